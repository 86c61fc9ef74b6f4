//! Scripts for guests.

/// A script that exercises the disk with this serial: it partitions the disk, formats it with blocks of `block_size`
/// bytes, fills and trims it, and verifies after a remount what was copied to it. It prints `ok STEP` after each step.
/// The file system stays mounted on `/mnt`; it is on the first partition, at 1 MiB.
pub fn disk_lifecycle(serial: &str, block_size: u32) -> String {
    let steps = include_str!("disk_lifecycle.sh");
    format!("device=$(disk {serial})\nblock_size={block_size}\n{steps}")
}

/// The script of a guest with four writers that read back what they wrote, bypassing the guest's page cache. Meanwhile
/// the guest prints `word` `times` times, every `seconds` seconds.
pub fn verifying_writers(word: &str, times: u32, seconds: u32) -> String {
    format!(
        "head -c 1048576 /dev/urandom >/tmp/data
         writer() {{
             until [ -e /tmp/enough ]; do
                 dd if=/tmp/data of=/dev/vda bs=64k seek=$(($1 * 64)) oflag=direct conv=notrunc 2>/tmp/dd.$1
                 dd if=/dev/vda bs=64k skip=$(($1 * 64)) count=16 iflag=direct 2>/tmp/dd.$1 | cmp - /tmp/data
                 echo >>/tmp/rounds
             done
         }}
         writers=
         for i in 1 2 3 4; do writer $i & writers=\"$writers $!\"; done
         for i in $(seq {times}); do
             sleep {seconds}
             echo {word}
         done
         sleep 1
         touch /tmp/enough
         for writer in $writers; do wait $writer; done
         ! dmesg | grep -i 'I/O error'
         [ $(wc -l </tmp/rounds) -ge 4 ]"
    )
}
