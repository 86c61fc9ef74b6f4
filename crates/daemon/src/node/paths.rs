//! Checks which file is at a disk's path, before it is opened and later: files are renamed, linked and replaced while they
//! are served.

use std::io;
use std::path::Path;
use std::sync::Arc;

use engine::{DiskFile, Identity, Locking, Support, choose};
use image::{Chain, Format, Image, LayerFormat, TopFile};

use super::open::raw_size;
use super::{Node, NodeError, format_of};
use crate::config::spec::{DiskSpec, FileSpec, Lock};
use crate::node::context::OpenContext;
use crate::node::storage::FileStorage;

/// How a disk uses a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileUse {
    Read,
    Write,
}

impl Node {
    /// Checks that the files of a disk could be opened, apart from a lock that another disk or the same one has now.
    /// Changes nothing.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn check_openable(spec: &DiskSpec, context: &OpenContext) -> Result<(), NodeError> {
        let FileSpec::Path(path) = &spec.file else {
            return Ok(());
        };
        let filename = path.display().to_string();
        let file = DiskFile::open_with(path, spec.cache, spec.read_only, Locking::None)?;
        let choice = choose(&file, spec.aio, &Support::here());
        choice.map_err(|e| NodeError::Aio(filename.clone(), e))?;
        let (facts, mut size) = (file.facts(), 0);
        match format_of(spec, path, file.backing())? {
            Format::Raw => size = raw_size(spec, path, &Arc::new(file), false)?,
            Format::Qcow2 => drop(files_named_by(spec, Arc::new(file), path, context)?),
        }
        let facts = facts.with_blocks(spec.logical_block, spec.physical_block, size);
        facts.map(drop).map_err(|e| NodeError::Blocks(filename, e))
    }

    /// Checks that the present lock could be replaced by the one that `spec` asks for.
    ///
    /// # Errors
    /// Another process has a conflicting lock.
    pub fn check_lock(&self, spec: &DiskSpec) -> Result<(), NodeError> {
        let Some(file) = self.is_acquired().then(|| self.file()).flatten() else {
            return Ok(());
        };
        if spec.lock == Lock::Always && file.facts().read_only && !spec.read_only {
            Ok(file.check_lock(&self.filename)?)
        } else {
            Ok(())
        }
    }

    /// Checks that a file exists at its path.
    ///
    /// # Errors
    /// None exists. The error says where the opened file is now, if that is known.
    pub fn check_there(&self) -> Result<(), NodeError> {
        let (FileSpec::Path(path), Some(file)) = (&self.spec.file, self.file()) else {
            return Ok(());
        };
        match std::fs::metadata(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                Err(NodeError::Gone(self.filename.clone(), place_now(&file)))
            }
            _ => Ok(()),
        }
    }

    /// Checks that the opened file is still at its path.
    ///
    /// # Errors
    /// It is not. The error says where it is now, if that is known.
    pub fn check_same(&self) -> Result<(), NodeError> {
        self.check_there()?;
        let (FileSpec::Path(path), Some(file)) = (&self.spec.file, self.file()) else {
            return Ok(());
        };
        match std::fs::metadata(path) {
            Ok(there) if Identity::of(&there) != file.identity() => {
                Err(NodeError::Another(self.filename.clone(), place_now(&file)))
            }
            _ => Ok(()),
        }
    }

    /// How this node uses a file or device, as its own or as a backing or data file. `None` if it does not.
    pub fn uses(&self, identity: Identity) -> Option<FileUse> {
        let state = self.state();
        let mut files = state.file.iter().chain(&state.files);
        let file = files.find(|file| file.identity() == identity)?;
        Some(if file.facts().read_only {
            FileUse::Read
        } else {
            FileUse::Write
        })
    }

    /// All files that it has open.
    pub fn files(&self) -> Vec<Identity> {
        let state = self.state();
        let files = state.file.iter().chain(&state.files);
        files.map(|file| file.identity()).collect()
    }

    /// The identity of its file, released or not.
    pub fn file_identity(&self) -> Option<Identity> {
        self.file().map(|file| file.identity())
    }

    /// This node with another path of the same file.
    ///
    /// # Errors
    /// From that path, the image would find other backing or data files.
    pub fn at(&self, spec: DiskSpec, path: &Path) -> Result<Self, NodeError> {
        let filename = path.display().to_string();
        let (image, file, files) = {
            let state = self.state();
            (state.image.clone(), state.file.clone(), state.files.clone())
        };
        if let (Some(Image::Chain(_)), Some(file)) = (image, file) {
            let named = files_named_by(&spec, file, path, &self.context)
                .map_err(|e| NodeError::Elsewhere(filename.clone(), format!(" ({e})")))?;
            if !named
                .into_iter()
                .eq(files.iter().skip(1).map(|file| file.identity()))
            {
                return Err(NodeError::Elsewhere(filename, String::new()));
            }
        }
        Ok(Self {
            filename,
            ..self.renamed(spec)
        })
    }

    /// Whether both use the same opened file.
    pub fn shares_file(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }
}

/// The files that an image names from a path, in the order of an opened image.
fn files_named_by(
    spec: &DiskSpec,
    file: Arc<DiskFile>,
    path: &Path,
    context: &OpenContext,
) -> Result<Vec<Identity>, NodeError> {
    let allow = |e| NodeError::Allow(path.display().to_string(), e);
    let flushes = false;
    let top = TopFile {
        storage: Arc::new(FileStorage { file, flushes }),
        path: &std::path::absolute(path).map_err(allow)?,
        format: LayerFormat::Qcow2,
    };
    let directories = context
        .allow_backing
        .allowed_directories(path, &context.rights)
        .map_err(allow)?;
    let data_file = context
        .rights
        .data_file_identity(spec)
        .map(|file| (file.device, file.inode));
    let named = Chain::referenced_files(top, data_file, &directories)?.into_iter();
    let named = named.map(|(device, inode)| Identity { device, inode });
    Ok(named.collect())
}

fn place_now(file: &DiskFile) -> String {
    let now = file.current_path();
    let now = now.map(|now| format!(", which is now at {}", now.display()));
    now.unwrap_or_default()
}
