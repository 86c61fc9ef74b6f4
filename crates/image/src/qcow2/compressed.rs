//! Compressed clusters. Nothing here accesses an image, so it runs outside of all locks.

use std::io;

use flate2::{Decompress, FlushDecompress, Status};

/// Bits of the window that a decoder keeps at most. A cluster has at most 2 MiB, 21 bits, and an encoder that does
/// not know the size of its input may use a slightly larger window.
const ZSTD_WINDOW_BITS_MAX: u32 = 23;

/// The compression type of an image's compressed clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Raw deflate, which QEMU calls zlib.
    Deflate,
    /// Zstandard.
    Zstd,
}

impl Compression {
    /// Fills `cluster` with the decompressed content of `from`. `from` may contain more bytes after the compressed
    /// data.
    ///
    /// # Errors
    /// `InvalidData` if the result is not exactly one cluster: the image is damaged.
    pub fn inflate(self, from: &[u8], cluster: &mut [u8]) -> io::Result<()> {
        let filled = match self {
            Self::Deflate => deflate(from, cluster),
            Self::Zstd => zstd(from, cluster),
        };
        if filled == Some(cluster.len()) {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "a compressed cluster does not decompress",
        ))
    }
}

/// Returns the number of bytes filled. The stream need not have an end: QEMU takes a full cluster as the end.
fn deflate(from: &[u8], cluster: &mut [u8]) -> Option<usize> {
    let mut stream = Decompress::new(false);
    match stream.decompress(from, cluster, FlushDecompress::Finish) {
        Ok(Status::StreamEnd | Status::BufError | Status::Ok) => {
            usize::try_from(stream.total_out()).ok()
        }
        Err(_) => None,
    }
}

fn zstd(from: &[u8], cluster: &mut [u8]) -> Option<usize> {
    use zstd::stream::raw::{DParameter, Decoder, InBuffer, Operation, OutBuffer};

    let mut decoder = Decoder::new().ok()?;
    decoder
        .set_parameter(DParameter::WindowLogMax(ZSTD_WINDOW_BITS_MAX))
        .ok()?;
    let mut from = InBuffer::around(from);
    let mut to = OutBuffer::around(cluster);
    loop {
        let before = (from.pos(), to.pos());
        // If there are several frames, QEMU reads as many as it needs.
        let left = decoder.run(&mut from, &mut to).ok()?;
        if to.pos() == to.capacity() {
            return Some(to.pos());
        }
        if left == 0 {
            decoder.reinit().ok()?;
        }
        if before == (from.pos(), to.pos()) {
            return None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn sample() -> Vec<u8> {
        (0..4096_u32).map(|i| ((i * i) >> 7) as u8).collect()
    }

    #[test]
    fn trailing_bytes_are_ignored() {
        let mut encoder =
            flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::default());
        encoder.write_all(&sample()).unwrap();
        let deflated = encoder.finish().unwrap();
        let zstd = zstd::bulk::compress(&sample(), 3).unwrap();
        for (kind, mut bytes) in [(Compression::Deflate, deflated), (Compression::Zstd, zstd)] {
            let mut cluster = vec![0; 4096];
            let short = bytes[..bytes.len() - 5].to_vec();
            bytes.extend([0xaa; 100]);
            kind.inflate(&bytes, &mut cluster).unwrap();
            assert_eq!(cluster, sample());
            assert!(kind.inflate(&short, &mut cluster).is_err());
            // A cluster larger than the data, and no data at all.
            assert!(kind.inflate(&bytes, &mut vec![0; 8192]).is_err());
            assert!(kind.inflate(&[], &mut cluster).is_err());
        }
    }
}
