//! The JSON form of a handle: what is read has the bytes that docs/format.md gives it, and survives both forms.
#![no_main]

use std::collections::HashMap;

use serde_json::{Map, Value};
use tidelog::{ChangelogHandle, varint};
use tidelog_fuzz::{memory, seal};

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    memory::within((1 << 20) + 300 * data.len(), || {
        check(text);
        if let Ok(Value::Object(mut fields)) = serde_json::from_str(text)
            && let Some(bytes) = encode(&fields)
        {
            let checksum = *bytes.last_chunk().expect("it ends with a checksum");
            fields.insert("checksum".to_owned(), format!("{:016x}", u64::from_le_bytes(checksum)).into());
            if let Some(handle) = check(&Value::Object(fields).to_string()) {
                assert_eq!(handle.to_bytes(), bytes);
            }
        }
    });
});

fn check(text: &str) -> Option<ChangelogHandle> {
    let handle = ChangelogHandle::from_json(text).ok()?;
    assert_eq!(ChangelogHandle::from_json(&handle.to_json()).as_ref(), Ok(&handle));
    assert_eq!(ChangelogHandle::from_bytes(&handle.to_bytes()).as_ref(), Ok(&handle));
    Some(handle)
}

/// The byte form of what the fields say, whether or not it makes sense; `None` if one is missing.
fn encode(fields: &Map<String, Value>) -> Option<Vec<u8>> {
    let mut out = vec![0; 16];
    out[8] = 1;
    out.extend(u128::from_str_radix(fields.get("log")?.as_str()?, 16).ok()?.to_le_bytes());
    put_text(&mut out, fields.get("name")?.as_str()?);
    for group in fields.get("key_groups")?.as_array()? {
        varint::put(&mut out, number(group)?);
    }
    let from = number(fields.get("from")?)?;
    varint::put(&mut out, from);
    varint::put(&mut out, number(fields.get("to")?)?.wrapping_sub(from));
    let extents = fields.get("extents")?.as_array()?;
    let mut indexes: HashMap<&str, usize> = HashMap::new();
    let (mut buckets, mut body) = (Vec::new(), Vec::new());
    for extent in extents {
        let pieces = extent.get("pieces")?.as_array()?;
        varint::put(&mut body, pieces.len() as u64);
        for piece in pieces {
            let bucket = piece.get("bucket")?.as_str()?;
            let next = indexes.len();
            let index = *indexes.entry(bucket).or_insert_with(|| {
                put_text(&mut buckets, bucket);
                next
            });
            varint::put(&mut body, index as u64);
            put_text(&mut body, piece.get("object")?.as_str()?);
            varint::put(&mut body, number(piece.get("offset")?)?);
            varint::put(&mut body, number(piece.get("bytes")?)?);
        }
        let [start, end] = extent.get("footer")?.as_array()?.as_slice() else { return None };
        varint::put(&mut body, number(start)?);
        varint::put(&mut body, number(end)?.wrapping_sub(number(start)?));
        body.extend(u64::from_str_radix(extent.get("token")?.as_str()?, 16).ok()?.to_le_bytes());
        varint::put(&mut body, number(extent.get("end")?)?.wrapping_sub(number(extent.get("first")?)?));
    }
    varint::put(&mut out, indexes.len() as u64);
    out.extend(buckets);
    varint::put(&mut out, extents.len() as u64);
    out.extend(body);
    out.extend([0; 8]);
    seal::handle(&mut out);
    Some(out)
}

fn number(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_str()?.parse().ok())
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    varint::put(out, text.len() as u64);
    out.extend(text.as_bytes());
}
