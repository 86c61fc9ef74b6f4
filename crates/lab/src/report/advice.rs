//! The recommendation: the best configuration in the syntax of QEMU, libvirt and Proxmox, and its costs.

use crate::analysis::Analysis;
use crate::plan::backing::Name;
use crate::plan::words::{Cache, Device};
use crate::plan::{IoThread, Server, Settings};
use crate::stats::Verdict;

/// A recommendation.
pub struct Advice {
    /// The result in one sentence.
    pub sentence: String,
    /// Its costs in CPU time and durability.
    pub costs: Vec<String>,
    /// The front-end, and the change for it.
    pub patches: Vec<(&'static str, String)>,
}

/// Derives the recommendation from a result.
pub fn advice(analysis: &Analysis) -> Advice {
    let plan = analysis.plan();
    let Some(first) = plan.cases.first() else {
        return Advice {
            sentence: "Nothing was measured.".into(),
            costs: Vec::new(),
            patches: Vec::new(),
        };
    };
    let count = |verdict| {
        analysis
            .verdicts
            .iter()
            .skip(plan.workloads.len())
            .filter(|found| **found == verdict)
            .count()
    };
    let Some((best, gain)) = analysis.best() else {
        let sentence = format!(
            "No configuration is clearly better than “{}”: of {} comparisons, {} are equivalent, {} are losses and {} are undecided.",
            first.name,
            analysis.verdicts.len().saturating_sub(plan.workloads.len()),
            count(Verdict::Equivalent),
            count(Verdict::Loss),
            count(Verdict::Undecided)
        );
        return Advice {
            sentence,
            costs: Vec::new(),
            patches: Vec::new(),
        };
    };
    let case = analysis.case(best);
    // Its clearest comparison with the first, if there is one.
    let direct = analysis
        .questions()
        .into_iter()
        .filter(|question| question.to == best && question.verdict == Verdict::Gain)
        .max_by(|a, b| a.gain.unwrap_or(0.0).total_cmp(&b.gain.unwrap_or(0.0)));
    let clearest = direct.and_then(|question| {
        let (low, high) = question.interval?;
        Some(format!(
            "; the clearest gain is against “{}” under {}: {} [{}, {}]",
            analysis.name(question.from),
            plan.workloads[question.workload].name,
            super::charts::percent(question.gain?),
            super::charts::percent(low),
            super::charts::percent(high)
        ))
    });
    let sentence = format!(
        "“{}” instead of “{}” brings {} over all {} loads{}{}.",
        case.name,
        first.name,
        over_all(analysis, best, gain),
        plan.workloads.len(),
        undecided(analysis, best),
        clearest.unwrap_or_default()
    );
    let mut costs = vec![cpu_cost(analysis, best)];
    costs.extend(durability(&first.settings, &case.settings));
    costs.push("To change devices and threads, stop and start the VM; a reboot of the guest is not enough.".into());
    let of_vm = changes_of_vm(&first.settings, &case.settings);
    let commented = |patch: String, before: &str, after: &str| {
        if of_vm.is_empty() {
            patch
        } else {
            format!("{before}and in the VM: {of_vm}{after}\n{patch}")
        }
    };
    let patches = vec![
        ("QEMU", commented(qemu(&case.settings), "# ", "")),
        (
            "libvirt",
            commented(libvirt(&case.settings), "<!-- ", " -->"),
        ),
        ("Proxmox VE", commented(proxmox(&case.settings), "# ", "")),
    ];
    Advice {
        sentence,
        costs,
        patches,
    }
}

/// The mean gain over all loads, with its interval.
fn over_all(analysis: &Analysis, best: usize, gain: f64) -> String {
    use super::charts::percent;
    match analysis.over_all(best) {
        Some((gain, Some(interval))) => format!(
            "{} [{}, {}]",
            percent(gain),
            percent(interval.low),
            percent(interval.high)
        ),
        _ => percent(gain),
    }
}

/// How many of the loads that a mean is about are not decided.
fn undecided(analysis: &Analysis, best: usize) -> String {
    let questions = analysis.questions();
    let own = questions.iter().filter(|it| (it.from, it.to) == (0, best));
    let (mut all, mut open) = (0, 0);
    for question in own {
        all += 1;
        open += usize::from(question.verdict == Verdict::Undecided);
    }
    match open {
        0 => String::new(),
        open => format!(", of which {} of {all} are undecided", open),
    }
}

/// The changes that concern the VM and not the disk.
fn changes_of_vm(before: &Settings, after: &Settings) -> String {
    let changed = before.differences(after);
    let words: Vec<String> = crate::plan::settings::OF_GUESTS
        .into_iter()
        .filter(|key| *key != "guests" && changed.contains(key))
        .map(|key| format!("{key}={}", after.get(key)))
        .collect();
    words.join(", ")
}

fn cpu_cost(analysis: &Analysis, best: usize) -> String {
    let of = |arm: usize| -> Option<f64> {
        let loads = 0..analysis.plan().workloads.len();
        let all: Vec<f64> = loads
            .filter_map(|load| analysis.summary(arm, load)?.cpu_us)
            .collect();
        (!all.is_empty()).then(|| all.iter().sum::<f64>() / all.len() as f64)
    };
    match (of(0), of(best)) {
        (Some(before), Some(after)) => {
            format!(
                "Host CPU per request: {before:.1} µs before, {after:.1} µs after, on average over all loads."
            )
        }
        _ => "Host CPU per request is unknown.".into(),
    }
}

fn durability(before: &Settings, after: &Settings) -> Option<String> {
    let lost = match after.cache {
        Cache::Unsafe => {
            "cache=unsafe ignores flushes: a crash of the host loses what the guest made durable, and may break its file system"
        }
        Cache::Writeback if before.cache.direct() => {
            "cache=writeback keeps writes in the host's memory until the guest flushes: as safe as a disk with a write cache; a crash of the host loses unflushed writes"
        }
        _ if before.cache == Cache::Writethrough || before.cache == Cache::Directsync => {
            "a completed write is durable only after the guest flushes"
        }
        _ => return Some("Durability is the same.".into()),
    };
    Some(format!("Durability: {lost}."))
}

/// Placeholders for the user's paths.
const DISK: &str = "/PATH/OF/DISK";
const SOCKET: &str = "/run/ringdisk/vm.sock";

fn disk_of(settings: &Settings) -> String {
    let first = settings.backing.first();
    first.map_or_else(|| DISK.into(), |name| name.to_string())
}

/// QEMU's driver, and where the disk is.
fn driver_of(settings: &Settings) -> String {
    match settings.backing.first() {
        Some(Name::Rbd { pool, image }) if !settings.krbd => {
            format!("driver=rbd,pool={pool},image={image}")
        }
        _ => format!("driver=file,filename={}", disk_of(settings)),
    }
}

fn server_command(settings: &Settings) -> String {
    let aio = settings
        .aio
        .map_or_else(String::new, |aio| format!(",aio={aio}"));
    let queues = settings.queues.unwrap_or(settings.vcpus);
    match settings.server {
        Server::QemuStorageDaemon => format!(
            "qemu-storage-daemon --object iothread,id=io0 --blockdev {},node-name=disk0,cache.direct={} \\\n  --export type=vhost-user-blk,id=export0,node-name=disk0,addr.type=unix,addr.path={SOCKET},writable=on,num-queues={queues},iothread=io0",
            driver_of(settings),
            if settings.cache.direct() { "on" } else { "off" }
        ),
        Server::Ringdisk | Server::Build(_) => format!(
            "ringdisk serve file={},cache={},queues={queues},socket={SOCKET}{aio}",
            disk_of(settings),
            settings.cache
        ),
        Server::Socket(_) => "# the server that serves the disk now".into(),
    }
}

fn qemu(settings: &Settings) -> String {
    let cache = format!(
        "cache.direct={},cache.no-flush={}",
        if settings.cache.direct() { "on" } else { "off" },
        if settings.cache == Cache::Unsafe {
            "on"
        } else {
            "off"
        }
    );
    let aio = settings
        .aio
        .map_or_else(String::new, |aio| format!(",aio={aio}"));
    let queues = settings
        .queues
        .map_or_else(String::new, |queues| format!(",num-queues={queues}"));
    let size = settings
        .queue_size
        .map_or_else(String::new, |size| format!(",queue-size={size}"));
    let blockdev = match settings.backing.first() {
        Some(Name::Rbd { pool, image }) if !settings.krbd => {
            format!("-blockdev driver=rbd,node-name=disk0,pool={pool},image={image},{cache}")
        }
        backing => format!(
            "-blockdev driver={},node-name=disk0,file.driver={},file.filename={},{cache},file.{}{}",
            settings.format,
            match backing {
                Some(Name::Path(path)) if path.starts_with("/dev") => "host_device",
                _ => "file",
            },
            disk_of(settings),
            cache.replace(',', ",file."),
            aio.replace(",aio", ",file.aio"),
        ),
    };
    match settings.device {
        Device::VhostUserBlk => format!(
            "{}\n\n-object memory-backend-memfd,id=mem,size=MEMORY,share=on -machine {},memory-backend=mem \\\n-chardev socket,id=disk0,path={SOCKET} \\\n-device vhost-user-blk-pci,chardev=disk0,num-queues={}{size}",
            server_command(settings),
            settings.machine,
            settings.queues.unwrap_or(settings.vcpus)
        ),
        Device::VirtioScsi => {
            let queues = queues.replace("num-queues", "num_queues");
            let (objects, controller) = match settings.iothread {
                IoThread::Off => (String::new(), format!("virtio-scsi-pci,id=scsi0{queues}")),
                IoThread::One => (
                    "-object iothread,id=io0 \\\n".into(),
                    format!("virtio-scsi-pci,id=scsi0,iothread=io0{queues}"),
                ),
                IoThread::Mapping(threads) => {
                    let (objects, mapping) = qemu_mapping(threads);
                    let count = settings.queues.unwrap_or(settings.vcpus);
                    let controller = format!(
                        "'{{\"driver\":\"virtio-scsi-pci\",\"id\":\"scsi0\",\"num_queues\":{count},\"iothread-vq-mapping\":[{mapping}]}}'"
                    );
                    (format!("{objects} \\\n"), controller)
                }
            };
            // QEMU creates devices in JSON after all others, so the disk is JSON as its controller may be.
            format!(
                "{objects}{blockdev} \\\n-device {controller} \\\n-device '{{\"driver\":\"scsi-hd\",\"bus\":\"scsi0.0\",\"drive\":\"disk0\"}}'"
            )
        }
        Device::Ide => format!("{blockdev} \\\n-device ide-hd,drive=disk0"),
        Device::VirtioBlk | Device::Host => match settings.iothread {
            IoThread::Off => {
                format!("{blockdev} \\\n-device virtio-blk-pci,drive=disk0{queues}{size}")
            }
            IoThread::One => {
                format!(
                    "-object iothread,id=io0 \\\n{blockdev} \\\n-device virtio-blk-pci,drive=disk0,iothread=io0{queues}{size}"
                )
            }
            IoThread::Mapping(threads) => {
                let (objects, mapping) = qemu_mapping(threads);
                format!(
                    "{objects} \\\n{blockdev} \\\n-device '{{\"driver\":\"virtio-blk-pci\",\"drive\":\"disk0\",\"num-queues\":{},\"iothread-vq-mapping\":[{mapping}]}}'",
                    settings.queues.unwrap_or(settings.vcpus),
                )
            }
        },
    }
}

/// QEMU's threads, and the list that spreads queues over them.
fn qemu_mapping(threads: u16) -> (String, String) {
    let each = |text: &dyn Fn(u16) -> String| (0..threads).map(text).collect::<Vec<_>>();
    let objects = each(&|n| format!("-object iothread,id=io{n}"));
    let mapping = each(&|n| format!("{{\"iothread\":\"io{n}\"}}"));
    (objects.join(" "), mapping.join(","))
}

fn libvirt(settings: &Settings) -> String {
    let queues = settings
        .queues
        .map_or_else(String::new, |queues| format!(" queues='{queues}'"));
    let size = settings
        .queue_size
        .map_or_else(String::new, |size| format!(" queue_size='{size}'"));
    if settings.device == Device::VhostUserBlk {
        let queues = settings.queues.unwrap_or(settings.vcpus);
        return format!(
            "<memoryBacking>\n  <source type='memfd'/>\n  <access mode='shared'/>\n</memoryBacking>\n\n<disk type='vhostuser' device='disk'>\n  <driver name='qemu' type='raw' queues='{queues}'{size}/>\n  <source type='unix' path='{SOCKET}'/>\n  <target dev='vda' bus='virtio'/>\n</disk>"
        );
    }
    let io = settings
        .aio
        .map_or_else(String::new, |aio| format!(" io='{aio}'"));
    let (threads, own, mut mapping) = match settings.iothread {
        IoThread::Off => (String::new(), String::new(), String::new()),
        IoThread::One => (
            "<iothreads>1</iothreads>\n\n".into(),
            " iothread='1'".to_owned(),
            String::new(),
        ),
        IoThread::Mapping(threads) => {
            let each: Vec<String> = (1..=threads)
                .map(|n| format!("      <iothread id='{n}'/>\n"))
                .collect();
            (
                format!("<iothreads>{threads}</iothreads>\n\n"),
                String::new(),
                format!("    <iothreads>\n{}    </iothreads>\n  ", each.concat()),
            )
        }
    };
    let (kind, source) = match settings.backing.first() {
        Some(Name::Rbd { pool, image }) => (
            "network",
            format!("<source protocol='rbd' name='{pool}/{image}'/>"),
        ),
        Some(Name::Path(path)) if path.starts_with("/dev") => {
            ("block", format!("<source dev='{}'/>", path.display()))
        }
        _ => ("file", format!("<source file='{}'/>", disk_of(settings))),
    };
    let source = harness::svg::escape(&source)
        .replace("&lt;", "<")
        .replace("&gt;", ">")
        .replace("&#39;", "'");
    let (bus, target, controller) = match settings.device {
        Device::VirtioScsi if !mapping.is_empty() => (
            "scsi",
            "sda",
            format!(
                "<!-- needs a libvirt whose controllers have iothreads -->\n<controller type='scsi' model='virtio-scsi'>\n  <driver{queues}>\n{}</driver>\n</controller>\n\n",
                std::mem::take(&mut mapping)
            ),
        ),
        Device::VirtioScsi => (
            "scsi",
            "sda",
            format!(
                "<controller type='scsi' model='virtio-scsi'>\n  <driver{own}{queues}/>\n</controller>\n\n"
            ),
        ),
        Device::Ide => ("ide", "hda", String::new()),
        _ => ("virtio", "vda", String::new()),
    };
    let own = if bus == "virtio" { own } else { String::new() };
    let queues = if bus == "virtio" {
        queues
    } else {
        String::new()
    };
    let size = if bus == "virtio" { size } else { String::new() };
    let driver = format!(
        "<driver name='qemu' type='{}' cache='{}'{io}{own}{queues}{size}",
        settings.format, settings.cache
    );
    let driver = if mapping.is_empty() {
        format!("{driver}/>")
    } else {
        format!("{driver}>\n{mapping}</driver>")
    };
    format!(
        "{threads}{controller}<disk type='{kind}' device='disk'>\n  {driver}\n  {source}\n  <target dev='{target}' bus='{bus}'/>\n</disk>"
    )
}

fn proxmox(settings: &Settings) -> String {
    if settings.device == Device::VhostUserBlk {
        return format!(
            "# Proxmox has no disks of this kind in its interface; they go into 'args' of the VM.\n{}\n\nqm set VMID --args '-object memory-backend-memfd,id=shared,size=MEMORYM,share=on -machine memory-backend=shared -chardev socket,id=disk0,path={SOCKET} -device vhost-user-blk-pci,chardev=disk0,num-queues={}'",
            server_command(settings),
            settings.queues.unwrap_or(settings.vcpus)
        );
    }
    let aio = settings
        .aio
        .map_or_else(String::new, |aio| format!(",aio={aio}"));
    let cache = format!("cache={}", settings.cache);
    let iothread = if settings.iothread == IoThread::Off {
        ""
    } else {
        ",iothread=1"
    };
    let volume = "STORAGE:vm-VMID-disk-0";
    let mapping = match settings.iothread {
        IoThread::Mapping(_) => {
            "# Proxmox has no iothread-vq-mapping in its interface; this is one IOThread.\n"
        }
        _ => "",
    };
    match settings.device {
        Device::VirtioScsi => format!(
            "{mapping}qm set VMID --scsihw virtio-scsi-single --scsi0 {volume},{cache}{aio}{iothread}"
        ),
        Device::Ide => format!("qm set VMID --ide0 {volume},{cache}{aio}"),
        _ => format!("{mapping}qm set VMID --virtio0 {volume},{cache}{aio}{iothread}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::words::Aio;

    #[test]
    fn patches_say_what_the_settings_say() {
        let one = Settings {
            iothread: IoThread::One,
            aio: Some(Aio::Native),
            queues: Some(4),
            ..Settings::default()
        };
        assert!(
            qemu(&one).contains("iothread=io0")
                && qemu(&one).contains("file.aio=native")
                && qemu(&one).contains("cache.direct=on")
        );
        assert!(
            libvirt(&one).contains("cache='none' io='native' iothread='1' queues='4'/>"),
            "{}",
            libvirt(&one)
        );
        assert!(proxmox(&one).contains("cache=none,aio=native,iothread=1"));
        let mapped = Settings {
            iothread: IoThread::Mapping(2),
            ..one.clone()
        };
        assert!(
            libvirt(&mapped).contains("<iothreads>2</iothreads>")
                && libvirt(&mapped).contains("<iothread id='2'/>")
        );
        assert!(qemu(&mapped).contains("iothread-vq-mapping"));
        let ours = Settings {
            device: Device::VhostUserBlk,
            ..one
        };
        assert!(
            qemu(&ours).contains("ringdisk serve")
                && libvirt(&ours).contains("vhostuser")
                && proxmox(&ours).contains("--args")
        );
    }

    #[test]
    fn less_durability_is_never_passed_over() {
        let safe = Settings::default();
        let lost = |cache| {
            durability(
                &safe,
                &Settings {
                    cache,
                    ..Settings::default()
                },
            )
            .unwrap()
        };
        assert!(
            lost(Cache::Unsafe).contains("ignores flushes")
                && lost(Cache::Writeback).contains("crash")
        );
        assert_eq!(lost(Cache::None), "Durability is the same.");
    }
}
