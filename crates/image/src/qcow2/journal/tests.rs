//! In which order the file of a journal is changed.

use std::sync::Mutex;

use super::*;

/// Records the calls to it.
#[derive(Default)]
struct Asked(Mutex<Vec<&'static str>>);

impl Asked {
    fn for_it(&self, what: &'static str) -> io::Result<()> {
        self.0.lock().unwrap().push(what);
        Ok(())
    }
}

impl Storage for Asked {
    fn read_at(&self, _: FileOffset, _: &mut [u8]) -> io::Result<usize> {
        Ok(0)
    }

    fn write_at(&self, _: FileOffset, _: &[u8]) -> io::Result<()> {
        self.for_it("write")
    }

    fn flush(&self) -> io::Result<()> {
        self.for_it("flush")
    }

    fn loses_data_on_failed_flush(&self) -> bool {
        false
    }

    fn size(&self) -> io::Result<u64> {
        Ok(0)
    }

    fn set_size(&self, _: u64) -> io::Result<()> {
        self.for_it("set size")
    }

    fn punch(&self, _: FileOffset, _: u64) -> io::Result<()> {
        self.for_it("punch")
    }

    fn block_size(&self) -> u32 {
        512
    }
}

/// A kill between the two calls must not leave a slot that says that the records begin where the file has been
/// punched: the records after that, appended while the flush was in progress, would be lost.
#[test]
fn records_are_freed_after_the_slot_is_written() {
    let storage = Arc::new(Asked::default());
    let file = JournalFile {
        storage: storage.clone(),
        identity: [7; 32],
        is_of_earlier_file: false,
        on_event: Box::new(|_| ()),
    };
    let mut journal = Journal::new(file, true, false, Lost::default());
    journal.begin(JournalBits::default());
    let end = RECORDS_AT + 2 * PUNCH;
    journal.end = end + 100;
    storage.0.lock().unwrap().clear();
    let rotated = Rotated {
        end,
        generation: None,
    };
    journal.checkpoint(&rotated, true, JournalBits::default());
    assert_eq!(*storage.0.lock().unwrap(), ["write", "punch"]);
}
