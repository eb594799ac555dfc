//! Reads handles from files: JSON, one a line, or one as bytes.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use tidelog::{ChangelogHandle, HandleError};

/// The longest line of JSON that is taken: more than any handle needs.
const LINE_BYTES_MAX: u64 = 128 << 20;
/// What a handle in bytes begins with.
pub const MAGIC: [u8; 8] = *b"tlogHDL\n";

/// Why a file gave no handles.
#[derive(Debug, thiserror::Error)]
pub enum HandlesError {
    /// The file cannot be read.
    #[error("cannot read {name}: {source}")]
    Io {
        /// The file.
        name: String,
        /// What the system said.
        source: io::Error,
    },
    /// What it holds is no handle.
    #[error("{name}{place}: {source}")]
    Handle {
        /// The file.
        name: String,
        /// The line, if it has lines.
        place: String,
        /// What is wrong with it.
        source: HandleError,
    },
}

/// All handles in a file; `-` is standard input. Empty lines do not count.
///
/// # Errors
/// See [`HandlesError`]; it names the file and the line.
pub fn read(path: &Path) -> Result<Vec<ChangelogHandle>, HandlesError> {
    if path.as_os_str() == "-" {
        return read_from("standard input", io::stdin());
    }
    let name = path.display().to_string();
    match File::open(path) {
        Ok(file) => read_from(&name, file),
        Err(source) => Err(HandlesError::Io { name, source }),
    }
}

/// All handles in an input; `name` is for errors.
///
/// # Errors
/// See [`HandlesError`].
pub fn read_from(name: &str, input: impl Read) -> Result<Vec<ChangelogHandle>, HandlesError> {
    let failed = |source| HandlesError::Io { name: name.to_owned(), source };
    let refused = |place, source| HandlesError::Handle { name: name.to_owned(), place, source };
    let mut reader = BufReader::with_capacity(64 << 10, input);
    if reader.fill_buf().map_err(failed)?.starts_with(&MAGIC) {
        let mut bytes = Vec::new();
        reader.take(LINE_BYTES_MAX).read_to_end(&mut bytes).map_err(failed)?;
        let handle = ChangelogHandle::from_bytes(&bytes).map_err(|source| refused(String::new(), source))?;
        return Ok(vec![handle]);
    }
    let mut handles = Vec::new();
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        (&mut reader).take(LINE_BYTES_MAX).read_until(b'\n', &mut line).map_err(failed)?;
        if line.is_empty() {
            break;
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        let handle = match std::str::from_utf8(&line) {
            Ok(text) => ChangelogHandle::from_json(text),
            Err(_) => Err(HandleError::NotAHandle),
        };
        handles.push(handle.map_err(|source| refused(format!(", line {number}"), source))?);
    }
    Ok(handles)
}

#[cfg(test)]
mod tests {
    use tidelog::{KeyGroupRange, LogId, SequenceNumber};

    use super::*;

    fn handle() -> ChangelogHandle {
        let (from, to) = (SequenceNumber(3), SequenceNumber(3));
        ChangelogHandle::new(LogId(7), "orders", KeyGroupRange::ALL, from, to, Vec::new()).unwrap()
    }

    #[test]
    fn lines_and_bytes() {
        let json = handle().to_json();
        let read = |input: &[u8]| read_from("input", input).map_err(|error| error.to_string());
        assert_eq!(read(b""), Ok(Vec::new()));
        assert_eq!(read(format!("{json}\n\n{json}").as_bytes()), Ok(vec![handle(), handle()]));
        assert_eq!(read(&handle().to_bytes()), Ok(vec![handle()]));
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        let json = handle().to_json();
        for (input, place) in [
            (format!("{json}\n{}\n", &json[..40]).into_bytes(), "input, line 2: "),
            (format!("{json}\n{}\n", json.replace("orders", "errors")).into_bytes(), "input, line 2: "),
            (b"\xff\n".to_vec(), "input, line 1: "),
            (handle().to_bytes()[..20].to_vec(), "input: "),
        ] {
            let error = read_from("input", &input[..]).unwrap_err().to_string();
            assert!(error.starts_with(place), "{error}");
        }
    }
}
