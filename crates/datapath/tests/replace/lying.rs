//! What a disk lies in: a raw file, or an image.

use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use block::{Aio, Backing, GuestOffset};
use image::{
    AllowedDirectories, Chain, ChainOptions, DataFile, FileRole, Image, LayerFormat, OpenFiles,
    PlainFile, Prepared, Storage, TopFile, WriteLocation,
};
use tempfile::TempDir;
use testkit::qemu_img as qemu;

/// The name of every image here.
const NAME: &str = "top.qcow2";

pub struct Lying {
    pub image: Image,
    files: Vec<File>,
    directory: Option<TempDir>,
}

impl Lying {
    pub fn raw(len: u64) -> Self {
        let file = tempfile::tempfile().unwrap();
        file.set_len(len).unwrap();
        Self {
            image: Image::raw(),
            files: vec![file],
            directory: None,
        }
    }

    /// An image, which may build on another that is full of something else.
    pub fn qcow2(len: u64, overlay: bool) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path();
        let mut create = format!("create -q -f qcow2 {NAME} {len}");
        if overlay {
            qemu::img(at, &format!("create -q -f qcow2 base.qcow2 {len}"));
            let fill = format!("write -q -P 0x99 0 {len}");
            qemu::io(at, "base.qcow2", &["-f", "qcow2"], &[fill]);
            create = format!("create -q -f qcow2 -b base.qcow2 -F qcow2 {NAME}");
        }
        qemu::img(at, &create);
        let mut opener = Opener::default();
        let path = at.join(NAME);
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let top = TopFile {
            storage: opener.keep(file),
            path: &path,
            format: LayerFormat::Qcow2,
        };
        let options = ChainOptions {
            read_only: false,
            allow_corrupt: false,
            l2_cache_bytes: None,
            punch: true,
            journal: None,
            flush_changes: false,
            progress: &mut |_| ControlFlow::Continue(()),
        };
        let allowed = AllowedDirectories::of_image(&path).unwrap();
        let chain = Chain::open(top, &allowed, &mut opener, options).unwrap();
        // In the order in which they were opened, which need not be that of their numbers.
        let files = chain.files().iter().map(|storage| {
            let same =
                |file: &&Arc<PlainFile>| std::ptr::addr_eq(Arc::as_ptr(file), Arc::as_ptr(storage));
            let file = opener.0.iter().find(same).unwrap();
            file.0.try_clone().unwrap()
        });
        Self {
            files: files.collect(),
            image: Image::Chain(Arc::new(chain)),
            directory: Some(directory),
        }
    }

    /// For a disk.
    pub fn files(&self) -> impl Iterator<Item = (Arc<OwnedFd>, Backing, Aio)> {
        let files = self.files.iter();
        files.map(|file| {
            let file = Arc::new(file.try_clone().unwrap().into());
            (file, Backing::File, Aio::Auto)
        })
    }

    /// Makes a raw one longer.
    pub fn set_len(&self, len: u64) {
        self.files[0].set_len(len).unwrap();
    }

    /// The first bytes of the disk.
    pub fn content(&self, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        match self.image.chain() {
            None => self.files[0].read_exact_at(&mut bytes, 0).unwrap(),
            Some(chain) => {
                let pin = chain.pins().pin(0);
                chain.read(&pin, GuestOffset(0), &mut bytes).unwrap();
                chain.pins().unpin(pin);
            }
        }
        bytes
    }

    /// Has the disk begin with these bytes.
    pub fn fill(&self, bytes: &[u8]) {
        match self.image.chain() {
            None => self.files[0].write_all_at(bytes, 0).unwrap(),
            Some(chain) => write(chain, bytes),
        }
    }

    /// Closes it; nothing but this has been written to it.
    pub fn ends_with(&self, bytes: &[u8]) {
        match (self.image.chain(), &self.directory) {
            (Some(chain), Some(directory)) => {
                chain.close().unwrap();
                qemu::check(directory.path(), NAME, false);
                assert!(qemu::content(directory.path(), NAME, "qcow2") == bytes);
            }
            _ => assert!(self.content(bytes.len() as u64) == bytes),
        }
    }
}

fn write(chain: &Chain, bytes: &[u8]) {
    let mut done = 0;
    while done < bytes.len() {
        let (at, rest) = (done as u64, &bytes[done..]);
        let pin = chain.pins().pin(0);
        let place = chain.map_write(&pin, GuestOffset(at), rest.len() as u64);
        chain.pins().unpin(pin);
        done += match place {
            WriteLocation::Load(missing) => {
                chain.load(missing).unwrap();
                0
            }
            WriteLocation::InPlace { at, len, .. } => {
                chain.write_file(at, &rest[..len as usize]).unwrap();
                len as usize
            }
            WriteLocation::Allocate { len } => {
                match chain.prepare_write(GuestOffset(at), len).unwrap() {
                    Prepared::Allocated(allocation) => {
                        let allocation = chain.fill(allocation).unwrap();
                        let (to, len) = (allocation.to, allocation.len as usize);
                        chain.write_file(to, &rest[..len]).unwrap();
                        chain.commit(allocation).unwrap();
                        len
                    }
                    Prepared::Mapped => 0,
                    Prepared::Wait(_) => panic!("nobody else writes"),
                }
            }
            WriteLocation::Damaged { .. } => panic!("{:?}", chain.damage()),
        };
    }
}

#[derive(Default)]
struct Opener(Vec<Arc<PlainFile>>);

impl Opener {
    fn keep(&mut self, file: File) -> Arc<dyn Storage> {
        let file = Arc::new(PlainFile(file));
        self.0.push(file.clone());
        file
    }
}

impl OpenFiles for Opener {
    fn open(&mut self, file: OwnedFd, _: &Path, _: FileRole) -> io::Result<Arc<dyn Storage>> {
        Ok(self.keep(file.into()))
    }

    fn data_file(&mut self, _: &Path, _: Option<&str>, _: bool) -> io::Result<DataFile> {
        unreachable!("no image here has one")
    }
}
