//! Guest memory in huge pages, where some can be reserved.

use guest::{GuestMemory, RegionLayout};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use testkit::memory::HugePages;

#[test]
fn regions_in_huge_pages() {
    let pages = match HugePages::reserve(4 << 20) {
        Ok(pages) => pages,
        Err(why) => return println!("skipped: regions_in_huge_pages: {why}"),
    };
    let page = pages.page;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB;
    let file = memfd_create("ringdisk-huge", flags).unwrap();
    ftruncate(&file, 2 * page).unwrap();
    let mappings = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.matches("ringdisk-huge").count()
    };

    // As front-ends share it, and at offsets and of lengths that are whole small pages only.
    for (file_offset, len) in [
        (0, 2 * page),
        (page, page),
        (page, 0x1000),
        (0x3000, 0x5000),
        (page - 0x1000, 0x2000),
    ] {
        let layout = RegionLayout {
            guest: 0x10_0000,
            len,
            user: 0x7000_0000_0000,
            file_offset,
        };
        let memory = GuestMemory::default()
            .with_region(layout, file.try_clone().unwrap())
            .unwrap();
        let region = memory.mappings().next().unwrap();
        assert_eq!(region.len as u64, len);
        assert_eq!(region.addr as u64 % page, file_offset % page);
        assert_eq!(mappings(), 1);
        drop(memory);
        assert_eq!(mappings(), 0, "offset {file_offset:#x}, {len:#x} bytes");
    }
}
