//! What must be true of any bytes that a server sends, for the fuzz target and for tests.

use std::os::unix::net::UnixStream;

use super::*;

/// A server that sends any bytes. Each request ends; what was read does not depend on what was in the buffer before; extents
/// cover no more than was asked for.
pub fn check(bytes: &[u8]) {
    let [first, second] = [0, 0xff].map(|fill| session(bytes, fill).ok());
    assert_eq!(first, second, "not all of a read has arrived");
}

/// What a client gets from these bytes of a server. The first byte decides what it asks for.
pub fn session(bytes: &[u8], fill: u8) -> io::Result<Vec<u8>> {
    let Some((choice, bytes)) = bytes.split_first() else {
        return Ok(Vec::new());
    };
    let (client, mut server) = UnixStream::pair()?;
    server.write_all(&bytes[..bytes.len().min(64 << 10)])?;
    server.shutdown(std::net::Shutdown::Write)?;
    let contexts = ["base:allocation", "qemu:dirty-bitmap:b"].map(String::from);
    let contexts = &contexts[..usize::from(choice % 3)];
    let stream = File::from(OwnedFd::from(client));
    let mut client = NbdClient::over(stream, "disk", contexts)?;
    let mut read = Vec::new();
    for turn in 0..4 {
        let bit = choice >> (2 + turn) & 1;
        if bit == 1 && !contexts.is_empty() {
            let length = 1 << 20;
            let status = client.status(0, length)?;
            assert_eq!(status.len(), contexts.len());
            for extents in status {
                assert!(!extents.is_empty() && extents.iter().all(|(bytes, _)| *bytes > 0));
                assert!(extents.iter().map(|(bytes, _)| bytes).sum::<u64>() <= length);
            }
        } else {
            let mut buffer = vec![fill; 600];
            client.read(4096, &mut buffer)?;
            read.extend(buffer);
        }
    }
    client.write(0, &[1; 512])?;
    client.zero(512, 512)?;
    client.flush()?;
    Ok(read)
}
