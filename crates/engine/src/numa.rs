//! NUMA placement of memory.

use std::io;
use std::ptr;

/// The NUMA node that holds the page at `address` of this process. A page that is not yet present is
/// allocated, as on first access.
///
/// # Errors
/// The address is not readable, or the kernel does not support NUMA nodes.
pub fn node_of(address: usize) -> io::Result<u32> {
    /// Flags of `linux/mempolicy.h`.
    const MPOL_F_NODE: libc::c_ulong = 1 << 0;
    const MPOL_F_ADDR: libc::c_ulong = 1 << 1;
    let mut node: libc::c_int = 0;
    // SAFETY: get_mempolicy(2) with MPOL_F_NODE writes one integer, and `node` has room for it. No mask is
    // passed, and the kernel validates the address itself.
    #[expect(unsafe_code, reason = "libc has no function for it")]
    let result = unsafe {
        libc::syscall(
            libc::SYS_get_mempolicy,
            &raw mut node,
            ptr::null_mut::<libc::c_ulong>(),
            0 as libc::c_ulong,
            address,
            MPOL_F_NODE | MPOL_F_ADDR,
        )
    };
    match result {
        0 => u32::try_from(node).map_err(io::Error::other),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mapped_memory_has_a_node() {
        let there = vec![1u8; 1 << 20];
        let node = node_of(there.as_ptr() as usize).unwrap();
        let path = format!("/sys/devices/system/node/node{node}");
        assert!(std::path::Path::new(&path).exists(), "{path}");
        let nowhere = node_of(0).unwrap_err();
        assert_eq!(nowhere.raw_os_error(), Some(libc::EFAULT));
    }
}
