//! The readable form of a handle.
//!
//! It carries the fields of the byte form and that form's checksum, so it may be reformatted but not edited.

use std::fmt::Write as _;

use serde_json::{Map, Value};

use super::{ChangelogHandle, Extent, HANDLE_BYTES_MAX, HANDLE_VERSION, HandleError, check_version, invalid};
use crate::piece::Piece;
use crate::{KeyGroupRange, LogId, SequenceNumber};

const JSON_FORMAT: &str = "tidelog-handle";
const JSON_BYTES_MAX: usize = 8 * HANDLE_BYTES_MAX;
/// The largest integer that every JSON reader keeps exactly.
const JSON_INTEGER_MAX: u64 = (1 << 53) - 1;

impl ChangelogHandle {
    /// The handle as one line of JSON, for people and for tools in other languages.
    ///
    /// Integers above 2^53 - 1 are strings of decimal digits; the log id, tokens and the checksum are hexadecimal
    /// strings.
    #[must_use]
    pub fn to_json(&self) -> String {
        let mut json = format!(
            r#"{{"format":"{JSON_FORMAT}","version":{HANDLE_VERSION},"log":"{}","name":{},"key_groups":[{},{}],"from":{},"to":{},"extents":["#,
            self.log,
            json_text(&self.name),
            self.key_groups.first(),
            self.key_groups.last(),
            json_integer(self.from.0),
            json_integer(self.to.0),
        );
        for (index, extent) in self.extents.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(
                json,
                r#"{comma}{{"pieces":[{}],"footer":[{},{}],"token":"{:016x}","first":{},"end":{}}}"#,
                json_pieces(&extent.pieces),
                json_integer(extent.footer.start),
                json_integer(extent.footer.end),
                extent.token,
                json_integer(extent.first.0),
                json_integer(extent.end.0),
            )
            .expect("writing to a string succeeds");
        }
        write!(json, r#"],"checksum":"{:016x}"}}"#, self.checksum()).expect("writing to a string succeeds");
        json
    }

    /// Reads what [`to_json`](Self::to_json) wrote, whatever its white space and order of fields.
    ///
    /// # Errors
    /// As for [`from_bytes`](Self::from_bytes); a JSON handle with any value changed is refused.
    pub fn from_json(text: &str) -> Result<ChangelogHandle, HandleError> {
        if text.len() > JSON_BYTES_MAX {
            return Err(invalid("the JSON is too long for a handle"));
        }
        let fields: Map<String, Value> = match serde_json::from_str(text) {
            Ok(Value::Object(fields)) => fields,
            Err(error) if error.is_eof() && text.trim_start().starts_with('{') => {
                return Err(HandleError::Truncated);
            }
            Err(error) if text.contains(JSON_FORMAT) => {
                return Err(invalid(format!("its JSON is malformed: {error}")));
            }
            Ok(_) | Err(_) => return Err(HandleError::NotAHandle),
        };
        if fields.get("format").and_then(Value::as_str) != Some(JSON_FORMAT) {
            return Err(HandleError::NotAHandle);
        }
        check_version(get_integer(&fields, "version")?.try_into().unwrap_or(u32::MAX))?;
        check_names(
            &fields,
            &["format", "version", "log", "name", "key_groups", "from", "to", "extents", "checksum"],
        )?;
        let log = get_text(&fields, "log")?;
        let log = get_hexadecimal(log, 32).map(LogId).ok_or_else(|| bad_json("log"))?;
        let [first, last] = get_pair(&fields, "key_groups")?;
        let key_groups = u16::try_from(first)
            .ok()
            .zip(u16::try_from(last).ok())
            .and_then(|(first, last)| KeyGroupRange::new(first, last))
            .ok_or_else(|| bad_json("key_groups"))?;
        let extents = get(&fields, "extents")?.as_array().ok_or_else(|| bad_json("extents"))?;
        let handle = ChangelogHandle {
            log,
            name: get_text(&fields, "name")?.to_owned(),
            key_groups,
            from: SequenceNumber(get_integer(&fields, "from")?),
            to: SequenceNumber(get_integer(&fields, "to")?),
            extents: extents.iter().map(read_json_extent).collect::<Result<_, _>>()?,
        };
        let checksum = get_text(&fields, "checksum")?;
        let checksum = get_hexadecimal(checksum, 16).ok_or_else(|| bad_json("checksum"))?;
        // An edit is told as such, not as whatever contradiction it made.
        if checksum != u128::from(handle.checksum()) {
            return Err(HandleError::Checksum);
        }
        handle.check()?;
        Ok(handle)
    }
}

fn json_pieces(pieces: &[Piece]) -> String {
    let json = |Piece { bucket, object, offset, bytes }: &Piece| {
        format!(
            r#"{{"bucket":{},"object":{},"offset":{},"bytes":{}}}"#,
            json_text(bucket),
            json_text(object),
            json_integer(*offset),
            json_integer(*bytes),
        )
    };
    pieces.iter().map(json).collect::<Vec<_>>().join(",")
}

fn json_text(text: &str) -> Value {
    Value::String(text.to_owned())
}

fn json_integer(value: u64) -> Value {
    if value <= JSON_INTEGER_MAX { Value::from(value) } else { Value::String(value.to_string()) }
}

fn bad_json(field: &str) -> HandleError {
    invalid(format!("its JSON field \"{field}\" is missing or malformed"))
}

fn get<'a>(fields: &'a Map<String, Value>, field: &str) -> Result<&'a Value, HandleError> {
    fields.get(field).ok_or_else(|| bad_json(field))
}

fn get_text<'a>(fields: &'a Map<String, Value>, field: &str) -> Result<&'a str, HandleError> {
    get(fields, field)?.as_str().ok_or_else(|| bad_json(field))
}

fn get_integer(fields: &Map<String, Value>, field: &str) -> Result<u64, HandleError> {
    integer(get(fields, field)?).ok_or_else(|| bad_json(field))
}

fn get_pair(fields: &Map<String, Value>, field: &str) -> Result<[u64; 2], HandleError> {
    match get(fields, field)?.as_array().map(Vec::as_slice) {
        Some([first, second]) => integer(first).zip(integer(second)).map(Into::into),
        _ => None,
    }
    .ok_or_else(|| bad_json(field))
}

fn integer(value: &Value) -> Option<u64> {
    match value {
        Value::String(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => digits.parse().ok(),
        value => value.as_u64(),
    }
}

fn get_hexadecimal(text: &str, digits: usize) -> Option<u128> {
    let plain = text.len() == digits && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if plain { u128::from_str_radix(text, 16).ok() } else { None }
}

/// Refuses fields that this version does not have: they would not be covered by the checksum.
fn check_names(fields: &Map<String, Value>, known: &[&str]) -> Result<(), HandleError> {
    match fields.keys().find(|field| !known.contains(&field.as_str())) {
        Some(field) => Err(invalid(format!("its JSON field \"{field}\" is unknown"))),
        None => Ok(()),
    }
}

fn read_json_extent(value: &Value) -> Result<Extent, HandleError> {
    let fields = value.as_object().ok_or_else(|| bad_json("extents"))?;
    check_names(fields, &["pieces", "footer", "token", "first", "end"])?;
    let pieces = get(fields, "pieces")?.as_array().ok_or_else(|| bad_json("pieces"))?;
    let [footer_start, footer_end] = get_pair(fields, "footer")?;
    let token = get_hexadecimal(get_text(fields, "token")?, 16).ok_or_else(|| bad_json("token"))?;
    Ok(Extent {
        pieces: pieces.iter().map(read_json_piece).collect::<Result<_, _>>()?,
        footer: footer_start..footer_end,
        token: token as u64,
        first: SequenceNumber(get_integer(fields, "first")?),
        end: SequenceNumber(get_integer(fields, "end")?),
    })
}

fn read_json_piece(value: &Value) -> Result<Piece, HandleError> {
    let fields = value.as_object().ok_or_else(|| bad_json("pieces"))?;
    check_names(fields, &["bucket", "object", "offset", "bytes"])?;
    Ok(Piece {
        bucket: get_text(fields, "bucket")?.into(),
        object: get_text(fields, "object")?.to_owned(),
        offset: get_integer(fields, "offset")?,
        bytes: get_integer(fields, "bytes")?,
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::{assert_invalid, fixture};
    use super::*;

    #[test]
    fn every_edit_and_truncation_of_the_json_is_detected() {
        let json = fixture().to_json();
        for end in (0..json.len()).filter(|&end| json.is_char_boundary(end)) {
            let expected = if end == 0 { HandleError::NotAHandle } else { HandleError::Truncated };
            assert_eq!(ChangelogHandle::from_json(&json[..end]), Err(expected), "cut at {end}");
        }
        for bit in 0..json.len() * 8 {
            let mut flipped = json.clone().into_bytes();
            flipped[bit / 8] ^= 1 << (bit % 8);
            // What still decodes must mean the same: a checksum's digit in upper case, for example.
            if let Ok(handle) = String::from_utf8(flipped)
                .map_err(drop)
                .and_then(|text| ChangelogHandle::from_json(&text).map_err(drop))
            {
                assert_eq!(handle, fixture(), "bit {bit}");
            }
        }
        let edits = [
            (r#""to":"1152921504606846976""#, r#""to":1000"#),
            (r#""from":100"#, r#""from":101"#),
            (r#""key_groups":[0,127]"#, r#""key_groups":[0,63]"#),
            ("000002-b", "000002-c"),
            ("/mnt/second", "/mnt/third"),
        ];
        for (old, new) in edits {
            assert!(json.contains(old), "{old} in {json}");
            assert_eq!(
                ChangelogHandle::from_json(&json.replacen(old, new, 1)),
                Err(HandleError::Checksum),
                "{new}"
            );
        }
        // Two edits that cancel each other in the byte form, where first numbers are not written.
        let shifted = json.replace(r#""first":400,"end":1000"#, r#""first":401,"end":1001"#);
        assert_invalid(ChangelogHandle::from_json(&shifted), "begins at 401, expected 400");
    }

    #[test]
    fn json_may_be_reformatted_but_not_extended() {
        let json = fixture().to_json();
        let pretty = serde_json::to_string_pretty(&serde_json::from_str::<Value>(&json).unwrap()).unwrap();
        assert_ne!(pretty, json);
        assert_eq!(ChangelogHandle::from_json(&pretty), Ok(fixture()));
        let extended = json.replacen('{', r#"{"comment":1,"#, 1);
        assert_invalid(ChangelogHandle::from_json(&extended), "\"comment\" is unknown");
    }
}
