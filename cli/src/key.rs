//! What a record is keyed by, and the key group that this gives: as Flink does it for string keys.
//!
//! `key group = murmur(hash(key)) % number of key groups`, where `hash` is Java's `String.hashCode()` of the key's text
//! and `murmur` is `MathUtils.murmurHash(int)` of Flink, as in `KeyGroupRangeAssignment.assignToKeyGroup`. So a Flink
//! job that is keyed by the same strings with the same maximum parallelism puts them into the same key groups. A key
//! that is not UTF-8 is hashed as Java's `Arrays.hashCode(byte[])`.

use std::borrow::Cow;
use std::str::FromStr;

use serde_json::Value;
use tidelog::KeyGroup;

/// The most key groups that Flink knows: its maximum parallelism.
pub const KEY_GROUPS_MAX: u32 = 1 << 15;

/// Where a record's key is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeySource {
    /// The whole record.
    Record,
    /// The field of that number, from 1, between separators.
    Field(usize),
    /// The string, number or boolean that a JSON pointer (RFC 6901) leads to in the record. A number's key is its
    /// shortest JSON text.
    Json(String),
}

/// Why a record has no key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// The record has fewer fields.
    #[error("it has {found} fields, the key is field {number}: check --key and --separator")]
    NoField {
        /// The field asked for, from 1.
        number: usize,
        /// How many there are.
        found: usize,
    },
    /// The record is not JSON.
    #[error("it is not JSON ({0}): check --key")]
    NotJson(String),
    /// The pointer leads nowhere, or to something that is no key.
    #[error("JSON pointer \"{0}\" does not lead to a string, number or boolean in it: check --key")]
    NoValue(String),
}

impl KeySource {
    /// The key of `record`; `separator` stands between its fields.
    ///
    /// # Errors
    /// See [`KeyError`].
    pub fn key<'a>(&self, record: &'a [u8], separator: u8) -> Result<Cow<'a, [u8]>, KeyError> {
        match self {
            KeySource::Record => Ok(Cow::Borrowed(record)),
            KeySource::Field(number) => {
                let mut fields = record.split(|&byte| byte == separator);
                match fields.nth(number - 1) {
                    Some(field) => Ok(Cow::Borrowed(field)),
                    None => Err(KeyError::NoField {
                        number: *number,
                        found: record.split(|&byte| byte == separator).count(),
                    }),
                }
            }
            KeySource::Json(pointer) => {
                let json: Value =
                    serde_json::from_slice(record).map_err(|error| KeyError::NotJson(error.to_string()))?;
                match json.pointer(pointer) {
                    Some(Value::String(text)) => Ok(Cow::Owned(text.clone().into_bytes())),
                    Some(value @ (Value::Number(_) | Value::Bool(_))) => {
                        Ok(Cow::Owned(value.to_string().into_bytes()))
                    }
                    Some(Value::Null | Value::Array(_) | Value::Object(_)) | None => {
                        Err(KeyError::NoValue(pointer.clone()))
                    }
                }
            }
        }
    }
}

impl FromStr for KeySource {
    type Err = String;

    fn from_str(text: &str) -> Result<KeySource, String> {
        if text == "record" {
            return Ok(KeySource::Record);
        }
        if let Some(number) = text.strip_prefix("field:") {
            return match number.parse() {
                Ok(number) if number > 0 => Ok(KeySource::Field(number)),
                _ => Err("fields are counted from 1, as in field:2".to_owned()),
            };
        }
        if let Some(pointer) = text.strip_prefix("json:") {
            return if pointer.is_empty() || pointer.starts_with('/') {
                Ok(KeySource::Json(pointer.to_owned()))
            } else {
                Err("a JSON pointer begins with a slash, as in json:/user/id".to_owned())
            };
        }
        Err("give record, field:NUMBER or json:/POINTER".to_owned())
    }
}

/// The key group of `key` among `key_groups`, as Flink assigns it.
///
/// # Panics
/// If `key_groups` is 0 or above [`KEY_GROUPS_MAX`].
pub fn key_group(key: &[u8], key_groups: u32) -> KeyGroup {
    assert!((1..=KEY_GROUPS_MAX).contains(&key_groups));
    let hash = match std::str::from_utf8(key) {
        Ok(text) => java_string_hash(text),
        Err(_) => java_bytes_hash(key),
    };
    KeyGroup((murmur_hash(hash) % key_groups) as u16)
}

/// `String.hashCode()`: over UTF-16 code units.
fn java_string_hash(text: &str) -> i32 {
    text.encode_utf16().fold(0i32, |hash, unit| hash.wrapping_mul(31).wrapping_add(i32::from(unit)))
}

/// `Arrays.hashCode(byte[])`: over signed bytes.
fn java_bytes_hash(bytes: &[u8]) -> i32 {
    bytes.iter().fold(1i32, |hash, &byte| hash.wrapping_mul(31).wrapping_add(i32::from(byte as i8)))
}

/// Flink's `MathUtils.murmurHash(int)`: 32-bit MurmurHash3 of one word, made positive.
fn murmur_hash(word: i32) -> u32 {
    let mut hash = (word as u32).wrapping_mul(0xcc9e_2d51).rotate_left(15).wrapping_mul(0x1b87_3593);
    hash = hash.rotate_left(13).wrapping_mul(5).wrapping_add(0xe654_6b64);
    hash ^= 4;
    hash ^= hash >> 16;
    hash = hash.wrapping_mul(0x85eb_ca6b);
    hash ^= hash >> 13;
    hash = hash.wrapping_mul(0xc2b2_ae35);
    hash ^= hash >> 16;
    match hash as i32 {
        // The one value that has no positive counterpart.
        i32::MIN => 0,
        hash => hash.unsigned_abs(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // All expected values were computed by OpenJDK 17 with String.hashCode, Arrays.hashCode and Flink's murmurHash.

    #[test]
    fn murmur_hashes_as_flink() {
        for (word, hash) in [
            (0, 593_689_054),
            (1, 68_075_478),
            (-1, 1_982_413_648),
            (42, 1_134_849_565),
            (i32::MAX, 1_653_689_534),
            (i32::MIN, 1_718_298_732),
            (123_456_789, 1_088_346_449),
            (-987_654_321, 1_314_828_554),
            // The only word whose hash is Integer.MIN_VALUE before it is made positive.
            (-2_089_875_627, 0),
        ] {
            assert_eq!(murmur_hash(word), hash, "{word}");
        }
        let sum = (0..1_000_000i32).fold(0i64, |sum, at| {
            sum.wrapping_mul(31).wrapping_add(i64::from(murmur_hash(at.wrapping_mul(2_654_435))))
        });
        assert_eq!(sum, -4_340_303_604_099_271_011);
    }

    #[test]
    fn strings_fall_into_the_key_groups_of_flink() {
        for (key, hash, of_128, of_32768) in [
            ("", 0, 94, 31_198),
            ("a", 97, 81, 19_409),
            ("user-1", -836_031_825, 121, 13_945),
            ("user-2", -836_031_824, 22, 25_878),
            ("orders", -1_008_770_331, 2, 7_682),
            ("Grüße", 69_215_351, 115, 9_715),
            ("日本語", 25_921_943, 27, 6_683),
            ("🦀 crab", 220_228_910, 13, 22_413),
            ("0123456789012345678901234567890123456789", 1_478_511_252, 44, 14_636),
        ] {
            assert_eq!(java_string_hash(key), hash, "{key}");
            assert_eq!(key_group(key.as_bytes(), 128), KeyGroup(of_128), "{key}");
            assert_eq!(key_group(key.as_bytes(), 32_768), KeyGroup(of_32768), "{key}");
        }
    }

    #[test]
    fn keys_that_are_not_text_are_hashed_as_byte_arrays() {
        for (key, hash, of_128) in
            [(&[0xff][..], 30, 26), (&[0, 1, 0x80, 127], 920_641, 10), (&[0xc3, 0x28, 65, 66], -853_209, 42)]
        {
            assert_eq!(java_bytes_hash(key), hash, "{key:x?}");
            assert_eq!(key_group(key, 128), KeyGroup(of_128), "{key:x?}");
        }
    }

    #[test]
    fn keys_are_found_or_their_absence_is_told() {
        let key = |source: &str, record: &str| {
            let source: KeySource = source.parse().unwrap();
            source.key(record.as_bytes(), b',').map(|key| String::from_utf8(key.into_owned()).unwrap())
        };
        assert_eq!(key("record", "a,b").as_deref(), Ok("a,b"));
        assert_eq!(key("field:1", "a,b").as_deref(), Ok("a"));
        assert_eq!(key("field:2", "a,b").as_deref(), Ok("b"));
        assert_eq!(key("field:2", "a,").as_deref(), Ok(""));
        assert_eq!(key("field:3", "a,b"), Err(KeyError::NoField { number: 3, found: 2 }));
        let record = r#"{"user":{"id":"grüße","n":7,"ok":true,"list":[1.5,null]}}"#;
        assert_eq!(key("json:/user/id", record).as_deref(), Ok("grüße"));
        assert_eq!(key("json:/user/n", record).as_deref(), Ok("7"));
        assert_eq!(key("json:/user/ok", record).as_deref(), Ok("true"));
        assert_eq!(key("json:/user/list/0", record).as_deref(), Ok("1.5"));
        assert_eq!(key("json:", "\"all of it\"").as_deref(), Ok("all of it"));
        for pointer in ["/user/list/1", "/user/list", "/user", "/user/none", "/user/list/2"] {
            assert_eq!(key(&format!("json:{pointer}"), record), Err(KeyError::NoValue(pointer.to_owned())));
        }
        assert!(matches!(key("json:/a", "plain"), Err(KeyError::NotJson(_))));
        for bad in ["", "field:0", "field:x", "json:user", "fields:1"] {
            assert!(bad.parse::<KeySource>().is_err(), "{bad}");
        }
    }
}
