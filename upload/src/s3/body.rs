//! What is sent: slices as an HTTP body that can be sent again, the checksum that goes with it, and what is seen of the
//! connection that takes it.
//!
//! The slices are handed to the connection piece by piece as they are; neither here nor in the SDK are they copied.
#![forbid(unsafe_code)]

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use aws_runtime::auth::PayloadSigningOverride;
use aws_sdk_s3::config::interceptors::{
    BeforeTransmitInterceptorContextMut, BeforeTransmitInterceptorContextRef,
};
use aws_sdk_s3::config::{ConfigBag, Intercept, RuntimeComponents};
use aws_sdk_s3::error::BoxError;
use aws_sdk_s3::primitives::{ByteStream, SdkBody};
use aws_smithy_runtime_api::client::connection::CaptureSmithyConnection;
use aws_smithy_types::base64;
use bytes::Bytes;
use http_body::{Frame, SizeHint};
use md5::{Digest, Md5};
use ring::digest::{Context as Sha256, SHA256};

use crate::store::Body;
use crate::wire::Wire;

/// How many bytes are hashed before other requests of the thread get their turn: about 0.2 ms.
const HASH_BYTES_AT_ONCE: usize = 256 << 10;

/// The most bytes that a connection is given at once, so that what it has taken says how fast it is. hyper asks for more
/// while it has less than about 400 KiB to write.
const FRAME_BYTES_MAX: usize = 128 << 10;

/// How the store is to find out that a body arrived damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Checksum {
    /// Its SHA-256 is part of the signature. The default: at 1.9 GB/s a core (with the SHA instructions of the processor, ring
    /// 0.17) three times as fast as MD5, and every store that checks signatures checks it.
    Sha256,
    /// `Content-MD5`, at 0.64 GB/s a core. For buckets that demand it, such as those with object lock, and for anonymous
    /// access, where nothing is signed.
    Md5,
    /// Nothing beyond TCP's and TLS's own checks.
    None,
}

/// A body as the SDK takes it. Every attempt to send it starts from the first slice, and tells the wire how far it is.
pub(crate) fn stream(body: &Body) -> ByteStream {
    let body = body.clone();
    ByteStream::new(SdkBody::retryable(move || {
        body.wire().took(0);
        let left = body.len();
        SdkBody::from_body_1_x(Slices { body: body.clone(), next: 0, taken: 0, left })
    }))
}

struct Slices {
    body: Body,
    /// The index of the next slice.
    next: usize,
    /// How many bytes of it are taken.
    taken: usize,
    /// The bytes from there on.
    left: u64,
}

impl http_body::Body for Slices {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        while let Some(slice) = this.body.slices().get(this.next) {
            let end = slice.len().min(this.taken + FRAME_BYTES_MAX);
            let frame = slice.slice(this.taken..end);
            this.taken = end;
            if frame.is_empty() {
                (this.next, this.taken) = (this.next + 1, 0);
                continue;
            }
            this.left -= frame.len() as u64;
            this.body.wire().took(this.body.len() - this.left);
            return Poll::Ready(Some(Ok(Frame::data(frame))));
        }
        Poll::Ready(None)
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}

/// What a request says of its body's bytes.
#[derive(Debug)]
pub(crate) struct Proof {
    /// For the header `Content-MD5`.
    pub(crate) md5: Option<String>,
    /// For the signature.
    pub(crate) payload: Payload,
}

impl Proof {
    /// Hashes a body, a piece at a time.
    pub(crate) async fn of(body: &Body, checksum: Checksum) -> Proof {
        let mut sha256 = Sha256::new(&SHA256);
        let mut md5 = Md5::new();
        if checksum != Checksum::None {
            for piece in body.slices().iter().flat_map(|slice| slice.chunks(HASH_BYTES_AT_ONCE)) {
                match checksum {
                    Checksum::Sha256 => sha256.update(piece),
                    Checksum::Md5 => md5.update(piece),
                    Checksum::None => {}
                }
                tokio::task::yield_now().await;
            }
        }
        let signed = match checksum {
            Checksum::Sha256 => PayloadSigningOverride::Precomputed(hex(sha256.finish().as_ref())),
            Checksum::Md5 | Checksum::None => PayloadSigningOverride::unsigned_payload(),
        };
        let md5 = (checksum == Checksum::Md5).then(|| base64::encode(md5.finalize()));
        Proof { md5, payload: Payload(signed) }
    }
}

/// Tells the signer the hash of the body, which it cannot compute of a body in slices.
#[derive(Clone, Debug)]
pub(crate) struct Payload(PayloadSigningOverride);

impl Intercept for Payload {
    fn name(&self) -> &'static str {
        "tidelog-payload-hash"
    }

    fn modify_before_signing(
        &self,
        _: &mut BeforeTransmitInterceptorContextMut<'_>,
        _: &RuntimeComponents,
        config: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        config.interceptor_state().store_put(self.0.clone());
        Ok(())
    }
}

/// Lets the wire of a body close the connection that took it.
#[derive(Debug)]
pub(crate) struct Retirement(Wire);

impl Retirement {
    pub(crate) fn of(body: &Body) -> Retirement {
        Retirement(body.wire().clone())
    }
}

impl Intercept for Retirement {
    fn name(&self) -> &'static str {
        "tidelog-retirement"
    }

    fn read_before_transmit(
        &self,
        _: &BeforeTransmitInterceptorContextRef<'_>,
        _: &RuntimeComponents,
        config: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        // The SDK has it made by each of its operations, for what it closes by itself.
        if let Some(connection) = config.load::<CaptureSmithyConnection>().cloned() {
            self.0.on_retire(move || {
                if let Some(connection) = connection.get() {
                    connection.poison();
                }
            });
        }
        Ok(())
    }
}

fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digit = |value: u8| char::from(DIGITS[usize::from(value)]);
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn frames(body: SdkBody) -> Vec<Bytes> {
        let mut stream = ByteStream::new(body);
        let mut found = Vec::new();
        while let Some(bytes) = stream.try_next().await.unwrap() {
            found.push(bytes);
        }
        found
    }

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap()
    }

    #[test]
    fn a_body_is_sent_again_from_its_start_and_never_copied() {
        let slices = vec![
            Bytes::from(vec![1; 100]),
            Bytes::new(),
            Bytes::from(vec![2; 2 * FRAME_BYTES_MAX]),
            Bytes::from(vec![3; FRAME_BYTES_MAX + 7]),
        ];
        let body = Body::new(slices.clone());
        let sent = stream(&body).into_inner();
        assert_eq!(sent.content_length(), Some(body.len()));
        let again = sent.try_clone().expect("replayable");
        runtime().block_on(async {
            for attempt in [sent, again] {
                let found = frames(attempt).await;
                assert_eq!(found.concat(), slices.concat());
                let pieces = |slice: &Bytes| {
                    slice.chunks(FRAME_BYTES_MAX).map(|piece| piece.as_ptr()).collect::<Vec<_>>()
                };
                let pointers: Vec<_> = found.iter().map(|frame| frame.as_ptr()).collect();
                assert_eq!(pointers, slices.iter().flat_map(pieces).collect::<Vec<_>>());
            }
        });
    }

    #[test]
    fn the_wire_tells_how_much_was_taken_by_the_attempt_under_way() {
        let body = Body::new(vec![Bytes::from(vec![1; FRAME_BYTES_MAX + 1]), Bytes::from(vec![2; 7])]);
        assert_eq!(body.wire().taken_bytes(), None);
        let sent = stream(&body).into_inner();
        runtime().block_on(async {
            for attempt in [sent.try_clone().expect("replayable"), sent] {
                let mut stream = ByteStream::new(attempt);
                let mut taken = vec![];
                while stream.try_next().await.unwrap().is_some() {
                    taken.push(body.wire().taken_bytes().unwrap() as usize);
                }
                assert_eq!(taken, [FRAME_BYTES_MAX, FRAME_BYTES_MAX + 1, FRAME_BYTES_MAX + 8]);
            }
        });
        assert_eq!(body.with_wire(Wire::default()).wire().taken_bytes(), None);
    }

    #[test]
    fn checksums_are_those_of_the_whole_body() {
        let text = vec![b'a'; HASH_BYTES_AT_ONCE + 5];
        let whole = Body::new(vec![Bytes::from(text.clone())]);
        let pieces = Body::new(text.chunks(1000).map(Bytes::copy_from_slice).collect());
        runtime().block_on(async {
            for checksum in [Checksum::Sha256, Checksum::Md5, Checksum::None] {
                let (one, other) = (Proof::of(&whole, checksum).await, Proof::of(&pieces, checksum).await);
                assert_eq!(format!("{one:?}"), format!("{other:?}"));
                assert_eq!(one.md5.is_some(), checksum == Checksum::Md5);
            }
            // The values that RFC 1321 and FIPS 180 give for "abc".
            let abc = Body::new(vec![Bytes::from_static(b"ab"), Bytes::from_static(b"c")]);
            let proof = Proof::of(&abc, Checksum::Md5).await;
            assert_eq!(proof.md5.unwrap(), "kAFQmDzST7DWlj99KOF/cg==");
            let proof = Proof::of(&abc, Checksum::Sha256).await;
            assert!(matches!(
                proof.payload.0,
                PayloadSigningOverride::Precomputed(hash)
                    if hash == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
            ));
        });
    }
}
