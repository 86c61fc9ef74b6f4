//! What the command line and the configuration say of the process.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use datapath::Polling;
use tracing::warn;

use crate::config::Config;
use crate::config::cpus::Cpus;
use crate::config::nbd::{NbdAddress, TlsSpec};
use crate::config::spec::DiskSpec;
use crate::credentials::{self, UserAccount};
use crate::inherited::Inherited;
use crate::monitor::control_socket;
use crate::node::journal::Journals;
use crate::sandbox::{Sandbox, SandboxError, SandboxOptions};
use crate::serve::{Args, ServeError, probe};
use crate::socket::reach;
use crate::state::store::StateError;
use crate::upgrade::socket::UpgradeSocket;
use crate::upgrade::successor;

/// What applies to the process: command-line options override the configuration.
pub struct Settings {
    pub iothreads: Option<usize>,
    pub cpus: Cpus,
    pub polling: Polling,
    /// As the operator has set it.
    pub control: Option<PathBuf>,
    pub control_path: PathBuf,
    pub metrics: Option<SocketAddr>,
    pub nbd: Option<NbdAddress>,
    pub tls: Option<TlsSpec>,
    pub on_command_line: OnCommandLine,
    pub backing: Vec<PathBuf>,
    pub fleece: Option<PathBuf>,
    pub state: Option<PathBuf>,
    pub user: Option<UserAccount>,
}

/// Which of these the command line sets.
pub struct OnCommandLine {
    pub metrics: bool,
    pub nbd: bool,
}

impl Settings {
    pub fn new(args: &Args, config: &Config) -> Result<Self, ServeError> {
        let mut polling = config.polling();
        polling.max = args.poll_max_us.map_or(polling.max, Duration::from_micros);
        polling.cpu = args.poll_cpu.unwrap_or(polling.cpu);
        let control = args.control.clone().or(config.control.clone());
        let state = args.state.clone().or(config.state.clone());
        let user = match (&args.user, &config.user, &args.config) {
            (None, Some(name), Some(file)) => UserAccount::find(name)
                .map(Some)
                .map_err(|e| Config::mistake(file, "user", e))?,
            (name, ..) => {
                let found = name.as_deref().map(UserAccount::find).transpose();
                found.map_err(SandboxError::User)?
            }
        };
        let nbd = args.nbd.clone().or(config.nbd.clone());
        let tls = args.nbd_tls.clone().or(config.nbd_tls.clone());
        if tls.is_some() && nbd.is_none() {
            // Clients of an address that a command names would not need TLS.
            return Err(ServeError::TlsAlone);
        }
        let backing = match &args.allow_backing[..] {
            [] => &config.allow_backing,
            given => given,
        };
        Ok(Self {
            iothreads: args.iothreads.map(usize::from).or(config.iothreads),
            cpus: args.cpus.clone().unwrap_or_else(|| {
                let cpus = config.cpus.clone().unwrap_or_default();
                // An upgrade is refused instead, and nobody loses a disk.
                if args.take_over {
                    cpus
                } else {
                    cpus.usable("cpus")
                }
            }),
            polling,
            control_path: control.clone().unwrap_or_else(control_socket::default_path),
            control,
            on_command_line: OnCommandLine {
                metrics: args.metrics.is_some(),
                nbd: args.nbd.is_some() || args.nbd_tls.is_some(),
            },
            metrics: args.metrics.or(config.metrics),
            nbd,
            tls: tls.map(|dir| TlsSpec {
                dir,
                verify_peer: !config.nbd_tls_any_peer,
            }),
            backing: backing.to_vec(),
            fleece: args.fleece.clone().or(config.fleece.clone()),
            state: state.or_else(state_directory),
            user,
        })
    }

    /// A process that takes over adopts the socket of the other one instead, unless the control socket has another path now.
    pub fn open_upgrade_socket(&self, take_over: bool) -> Option<UpgradeSocket> {
        if take_over {
            return UpgradeSocket::open_if_new(&self.control_path);
        }
        // At the default path, another ringdisk may have it and keep it.
        let patience = match self.control {
            Some(_) => Duration::from_secs(3),
            None => Duration::ZERO,
        };
        UpgradeSocket::open(&self.control_path, patience)
    }

    /// This process's own upgrade socket, or that of the process that it takes over from.
    pub fn upgrade_socket(
        &self,
        own: Option<UpgradeSocket>,
        inherited: &Inherited,
        take_over: bool,
    ) -> Option<UpgradeSocket> {
        let socket = own.or_else(|| UpgradeSocket::adopt(inherited, &self.control_path));
        if take_over && socket.is_none() {
            let path = self.control_path.display();
            warn!("live upgrade disabled: no upgrade socket inherited at {path}");
        }
        socket
    }

    /// Decides what depends on the user that this process becomes.
    ///
    /// # Errors
    /// The process that is to be replaced runs as another user, to whom state, journals and sockets belong.
    pub fn become_later(&self, disks: &[DiskSpec], take_over: bool) -> Result<(), ServeError> {
        if take_over {
            let later = self.user.as_ref().map(|user| user.uid);
            let what = "this process cannot take over from the running ringdisk";
            successor::check_user(later).map_err(|e| ServeError::System(what, e))?;
        }
        if let Some(user) = &self.user {
            credentials::set_later_user(user);
            reach::warn_if_not_member(user, disks);
        }
        Ok(())
    }

    pub fn enter_sandbox(
        &self,
        args: &Args,
        config: &Config,
        disks: &[DiskSpec],
        journals: &Journals,
    ) -> Result<Arc<Sandbox>, ServeError> {
        let persistent = persistent_directories(self, journals)?;
        let options = SandboxOptions {
            mode: args.sandbox.or(config.sandbox).unwrap_or_default(),
            allow: args.allow_dir.clone(),
            configured: config.allow.clone(),
            attached: self.state.as_deref().map_or_else(Vec::new, probe::attached),
            readable: (self.tls.iter().map(|tls| tls.dir.clone()))
                .chain(journals.of_others())
                .collect(),
            user: self.user.clone(),
            listens: self.metrics.is_some() || matches!(self.nbd, Some(NbdAddress::Tcp(_))),
        };
        let mut sockets: Vec<&Path> = self.control.iter().map(PathBuf::as_path).collect();
        if let Some(NbdAddress::Unix(path)) = &self.nbd {
            sockets.push(path);
        }
        let config_file = args.config.as_deref();
        let backing = &self.backing;
        let sandbox = Sandbox::enter(&options, config_file, disks, &sockets, backing, &persistent)?;
        Ok(Arc::new(sandbox))
    }
}

/// The directories in which this process keeps files. Creates those of the state and of old data.
fn persistent_directories(
    settings: &Settings,
    journals: &Journals,
) -> Result<Vec<PathBuf>, ServeError> {
    let mut directories = vec![journals.directory.clone()];
    if let Some(state) = &settings.state {
        credentials::make_directory(state, settings.user.as_ref())
            .map_err(|e| StateError::Directory(state.clone(), e))?;
        directories.push(state.clone());
    }
    if let Some(fleece) = &settings.fleece {
        credentials::make_directory(fleece, settings.user.as_ref())
            .map_err(|e| ServeError::Fleece(fleece.clone(), e))?;
        directories.push(fleece.clone());
    }
    Ok(directories)
}

/// The directory that a service manager has made for persistent state (systemd.exec(5), `StateDirectory`).
fn state_directory() -> Option<PathBuf> {
    let all = std::env::var_os("STATE_DIRECTORY")?;
    let first = std::env::split_paths(&all).next();
    first.filter(|first| first.is_absolute())
}
