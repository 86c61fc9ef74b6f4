//! QMP commands that add and remove nodes, exports, throttle groups and I/O threads.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use block::{Aio, CacheMode, DetectZeroes, Discard, ThrottleLimits};
use control::{
    BlockDirtyBitmapOrStr, BlockExportOptions, BlockExportOptionsNbd, BlockExportType,
    BlockdevDriver, BlockdevOptions, BlockdevOptionsRbd, BlockdevRef, CommandError,
    InetSocketAddress, NULL_BYTES_DEFAULT, NbdServerStart, ObjectOptions, ObjectType,
    SocketAddressLegacyType, TlsCredsEndpoint,
};
use datapath::Polling;
use image::Format;
use rbd::Location;

use super::Run;
use crate::config::ThreadSpec;
use crate::config::cpus::Cpus;
use crate::config::disk_keys;
use crate::config::export::ExportSpec;
use crate::config::nbd::{NbdAddress, NbdExportSpec, TlsSpec};
use crate::config::spec::{DiskSpec, FileSpec, SocketAccess};
use crate::server::{Claim, Server, ServerError, resources};

/// The path of an image's data file.
fn data_file_of(file: &BlockdevRef) -> Result<PathBuf, CommandError> {
    if let BlockdevRef::Definition(file) = file
        && file.node_name.is_none()
        && let BlockdevDriver::File(file) | BlockdevDriver::HostDevice(file) = &file.driver
    {
        return Ok(file.filename.0.clone());
    }
    Err(CommandError::generic(
        "the data file of a qcow2 image is given in place, as in data-file={driver=file,filename=...}",
    ))
}

/// The node that others name as the one below them.
fn child_of(options: &BlockdevOptions) -> Option<&String> {
    match &options.driver {
        BlockdevDriver::Raw(raw) => match &raw.file {
            BlockdevRef::Reference(child) => Some(child),
            BlockdevRef::Definition(file) => child_of(file),
        },
        _ => None,
    }
}

/// The file that a node opens.
fn path_of(options: &BlockdevOptions) -> Option<&PathBuf> {
    let below = match &options.driver {
        BlockdevDriver::File(file) | BlockdevDriver::HostDevice(file) => {
            return Some(&file.filename.0);
        }
        BlockdevDriver::Raw(raw) => &raw.file,
        BlockdevDriver::Qcow2(image) => &image.file,
        _ => return None,
    };
    match below {
        BlockdevRef::Definition(file) => path_of(file),
        BlockdevRef::Reference(_) => None,
    }
}

fn claim_node<'a>(
    run: &Run<'a>,
    name: &str,
    options: &BlockdevOptions,
) -> Result<Claim<'a>, CommandError> {
    let mut names = vec![name.to_owned()];
    names.extend(child_of(options).cloned());
    if let Some(path) = path_of(options) {
        let file = FileSpec::Path(path.clone());
        names.extend(run.server.file_resources(name, &file));
    }
    run.claim(|| names.clone())
}

pub(super) fn add_node(run: &Run<'_>, options: &BlockdevOptions) -> Result<(), CommandError> {
    let server = run.server;
    let name = options.root_node_name()?.to_string();
    let claim = claim_node(run, &name, options)?;
    if server.is_absent(&name) {
        return Err(server.not_there(&name).into());
    }
    // A raw format over a protocol adds nothing but a name. As in QEMU, what is discarded must be allowed
    // at every level, and what is read-only below is so above.
    let mut inner = options;
    let mut discard = Discard::Unmap;
    let mut read_only = false;
    let (mut format, mut l2_cache_bytes, mut data_file) = (Format::Raw, None, None);
    let (file, aio) = loop {
        discard = match inner.discard {
            Some(Discard::Unmap) => discard,
            _ => Discard::Ignore,
        };
        read_only |= inner.read_only.unwrap_or(false);
        let below = match &inner.driver {
            BlockdevDriver::File(file) | BlockdevDriver::HostDevice(file) => {
                let aio = file.aio.map_or(Aio::Auto, Aio::from);
                break (FileSpec::Path(file.filename.0.clone()), aio);
            }
            BlockdevDriver::Rbd(_) if format != Format::Raw => {
                return Err(CommandError::generic(
                    "qcow2 on an image in a Ceph cluster is not served: the image has snapshots and clones itself \
                     ('rbd clone')",
                ));
            }
            BlockdevDriver::Rbd(image) => {
                let location = location_of(image).map_err(CommandError::generic)?;
                read_only |= location.snapshot.is_some();
                break (FileSpec::Rbd(Box::new(location)), Aio::Auto);
            }
            BlockdevDriver::NullCo(null) => match null.size.unwrap_or(NULL_BYTES_DEFAULT) {
                n if n > 0 && n.is_multiple_of(512) => break (FileSpec::Null(n), Aio::Auto),
                n => {
                    let problem = format!("size: {n} bytes is not a positive multiple of 512");
                    return Err(CommandError::generic(problem));
                }
            },
            BlockdevDriver::Raw(raw) => &raw.file,
            BlockdevDriver::Qcow2(_) if format != Format::Raw => {
                return Err(CommandError::generic(
                    "a qcow2 image inside of another is not served",
                ));
            }
            BlockdevDriver::Qcow2(image) => {
                (format, l2_cache_bytes) = (Format::Qcow2, image.l2_cache_size);
                data_file = image.data_file.as_ref().map(data_file_of).transpose()?;
                &image.file
            }
        };
        match below {
            BlockdevRef::Definition(file) if file.node_name.is_some() => {
                return Err(CommandError::generic(
                    "'node-name' of a nested node is not kept; leave it out, or add that node first and \
                     name it here",
                ));
            }
            BlockdevRef::Definition(file) => inner = file,
            BlockdevRef::Reference(_) if format != Format::Raw => {
                return Err(CommandError::generic(
                    "the file of a qcow2 image is given in place, as in file={driver=file,filename=...}",
                ));
            }
            BlockdevRef::Reference(child) => {
                let below = spec_of(server, child)?;
                let spec = DiskSpec {
                    name,
                    discard: match below.discard {
                        Discard::Unmap => discard,
                        Discard::Ignore => Discard::Ignore,
                    },
                    detect_zeroes: options.detect_zeroes.unwrap_or(below.detect_zeroes),
                    read_only: read_only || below.read_only,
                    ..below
                };
                return Ok(server.add_node_over(&claim, child, spec)?);
            }
        }
    };
    // What the outer node says of caches goes; what it leaves out is the inner one's.
    let cache = options.cache.as_ref().map_or(inner, |_| options);
    let detect_zeroes = options.detect_zeroes.or(inner.detect_zeroes);
    let spec = DiskSpec {
        format: Some(format),
        data_file,
        l2_cache_bytes,
        cache: cache.cache_mode(false)?,
        aio,
        read_only,
        discard,
        detect_zeroes: detect_zeroes.unwrap_or(DetectZeroes::Off),
        ..DiskSpec::new(name, file)
    };
    Ok(server.add_node(&claim, spec)?)
}

fn location_of(options: &BlockdevOptionsRbd) -> Result<Location, String> {
    let mut location = Location::new(
        &options.pool,
        options.namespace.as_deref(),
        &options.image,
        options.snapshot.as_deref(),
    )?;
    let access = [
        ("conf", &options.conf),
        ("id", &options.user),
        ("keyring", &options.keyring),
    ];
    for (key, value) in access {
        if let Some(value) = value {
            location.access.set(key, value)?;
        }
    }
    if let Some(n) = options.connections {
        location.access.set("connections", &n.to_string())?;
    }
    for option in options.options.iter().flatten() {
        match option.split_once('=') {
            Some((key, value)) => location.access.set(key, value)?,
            None => return Err(format!("x-ringdisk-options: '{option}' is not KEY=VALUE")),
        }
    }
    Ok(location)
}

pub(super) fn add_export(run: &Run<'_>, options: &BlockExportOptions) -> Result<(), CommandError> {
    let server = run.server;
    let taken = match &options.kind {
        BlockExportType::VhostUserBlk(device) => resources::socket(device.addr.path()),
        BlockExportType::Nbd(nbd) => {
            resources::nbd_name(nbd.name.as_ref().unwrap_or(&options.node_name))
        }
    };
    let names = || {
        vec![
            options.node_name.clone(),
            options.id.to_string(),
            taken.clone(),
        ]
    };
    let claim = run.claim(names)?;
    let device = match &options.kind {
        BlockExportType::VhostUserBlk(device) => device,
        BlockExportType::Nbd(nbd) => return add_nbd_export(server, &claim, options, nbd),
    };
    let node = spec_of(server, &options.node_name)?;
    let cache = match (options.writethrough, node.cache) {
        (Some(true), CacheMode::Writeback) => CacheMode::Writethrough,
        (Some(true), CacheMode::None) => CacheMode::Directsync,
        (Some(true), CacheMode::Unsafe) => {
            return Err(CommandError::generic(
                "cache.no-flush of the node contradicts writethrough of the export; leave one out",
            ));
        }
        (_, cache) => cache,
    };
    let queues = device.num_queues.unwrap_or(1);
    let logical_block = device.logical_block_size;
    let bad = |option: &str| {
        let option = option.to_owned();
        move |problem| CommandError::generic(format!("{option}: {problem}"))
    };
    disk_keys::check("queues", queues).map_err(bad("num-queues"))?;
    if let Some(bytes) = logical_block {
        disk_keys::check("logical-block-size", bytes).map_err(bad("logical-block-size"))?;
    }
    let spec = ExportSpec {
        id: options.id.to_string(),
        socket: device.addr.path().clone(),
        socket_access: SocketAccess::default(),
        queues: Some(queues),
        queue_size: node.queue_size,
        iothreads: options
            .iothread
            .as_ref()
            .map_or(Vec::new(), |threads| threads.ids().to_vec()),
        read_only: !options.writable.unwrap_or(false),
        cache,
        logical_block: logical_block.map(|bytes| bytes as u32),
    };
    let added = server.add_export(&claim, &options.node_name, &spec);
    Ok(added.map(drop)?)
}

fn add_nbd_export(
    server: &Server,
    claim: &Claim<'_>,
    options: &BlockExportOptions,
    nbd: &BlockExportOptionsNbd,
) -> Result<(), CommandError> {
    if options.writethrough == Some(true) {
        return Err(CommandError::generic(
            "writethrough: NBD clients ask for durable writes themselves, with FUA; leave it out",
        ));
    }
    // The I/O threads of the disk do the clients' I/O.
    if let Some(threads) = &options.iothread {
        server.threads.check(threads.ids())?;
    }
    let mut limits = ThrottleLimits::NONE;
    limits.bps_total.average = nbd.bps.unwrap_or(0);
    limits.iops_total.average = nbd.iops.unwrap_or(0);
    let name = nbd.name.as_ref().unwrap_or(&options.node_name);
    let mut bitmaps = Vec::new();
    for bitmap in nbd.bitmaps.iter().flatten() {
        bitmaps.push(match bitmap {
            BlockDirtyBitmapOrStr::Local(name) => name.clone(),
            BlockDirtyBitmapOrStr::External(bitmap) => {
                server.check_bitmap_node(&options.node_name, bitmap)?;
                bitmap.name.clone()
            }
        });
    }
    let spec = NbdExportSpec {
        id: options.id.to_string(),
        node: options.node_name.clone(),
        name: name.clone(),
        description: nbd.description.clone().unwrap_or_default(),
        writable: options.writable.unwrap_or(false),
        bitmaps,
        limits,
    };
    Ok(server.add_nbd_export(claim, spec)?)
}

pub(super) fn start_nbd(run: &Run<'_>, wanted: &NbdServerStart) -> Result<(), CommandError> {
    if wanted.max_connections.is_some_and(|n| n > 0) {
        return Err(CommandError::generic(
            "max-connections: the limit of connections cannot be changed; leave it out",
        ));
    }
    let address = match &wanted.addr.kind {
        SocketAddressLegacyType::Unix(unix) => NbdAddress::Unix(unix.data.path.0.clone()),
        SocketAddressLegacyType::Inet(inet) => {
            let InetSocketAddress { host, port } = &inet.data;
            let address = host.parse().map(|host| (host, port.parse()));
            match address {
                Ok((host, Ok(port))) => NbdAddress::Tcp(SocketAddr::new(host, port)),
                _ => {
                    let problem = format!("'{host}' and '{port}' are not an IP address and a port");
                    return Err(CommandError::generic(problem));
                }
            }
        }
    };
    let socket = match &address {
        NbdAddress::Unix(path) => Some(resources::socket(path)),
        NbdAddress::Tcp(_) => None,
    };
    let _claim = run.claim(|| socket.iter().collect())?;
    let tls = wanted.tls_creds.as_deref();
    Ok(run.server.start_nbd(&address, tls)?)
}

pub(super) fn add_object(server: &Server, options: &ObjectOptions) -> Result<(), CommandError> {
    let id = options.id.to_string();
    match &options.kind {
        ObjectType::ThrottleGroup(group) => Ok(server.add_group(&id, &group.limits)?),
        ObjectType::Iothread(thread) => {
            let spec = ThreadSpec {
                cpus: Cpus::default(),
                polling: Polling {
                    max: match thread.poll_max_ns {
                        Some(ns) => Duration::from_nanos(ns).min(Duration::from_millis(10)),
                        None => server.threads.polling().max,
                    },
                    ..server.threads.polling()
                },
            };
            Ok(server.threads.add(&id, spec)?)
        }
        ObjectType::TlsCredsX509(tls) => {
            if tls.endpoint != Some(TlsCredsEndpoint::Server) {
                return Err(CommandError::generic(
                    "endpoint: ringdisk has certificates of servers only; add endpoint=server",
                ));
            }
            let Some(dir) = &tls.dir else {
                return Err(CommandError::generic(
                    "dir: name the directory of the certificates",
                ));
            };
            let spec = TlsSpec {
                dir: dir.into(),
                verify_peer: tls.verify_peer.unwrap_or(true),
            };
            Ok(server.add_tls(&id, spec)?)
        }
    }
}

pub(super) fn remove_object(run: &Run<'_>, id: &str) -> Result<(), CommandError> {
    let server = run.server;
    // A reload may be starting a disk that uses it.
    let _claim = run.claim(|| vec![resources::group(id), resources::thread(id)])?;
    if server.remove_tls(id)? {
        return Ok(());
    }
    match server.remove_group(id) {
        Err(ServerError::NoGroup(_)) => Ok(server.threads.remove(id)?),
        result => Ok(result?),
    }
}

fn spec_of(server: &Server, node: &str) -> Result<DiskSpec, CommandError> {
    let mut found = None;
    server.each_disk(|disk| {
        if disk.node.name() == node {
            found = Some(disk.node.spec.clone());
        }
    });
    found.ok_or_else(|| server.not_there(node).into())
}
