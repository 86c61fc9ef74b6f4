use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use proptest::prelude::*;

use super::*;
use crate::proxmox::description::{decoded, encoded};

const VM: &str = "agent: 1\nboot: order=scsi0;net0\ncores: 4\nmemory: 2048\nnet0: virtio=BC:24:11:00:00:01,bridge=vmbr0\n\
                      ostype: l26\nscsi0: local:100/vm-100-disk-0.qcow2,discard=on,iops_rd=500,mbps=10.5,size=8G\n\
                      scsihw: virtio-scsi-single\nsmbios1: uuid=1\n";

fn request<'a>(drives: &'a [String], storages: Option<&'a Source>) -> Request<'a> {
    Request {
        vm: "100",
        drives,
        snippets: Some("local"),
        storages,
    }
}

fn corpus() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/proxmox")
}

#[test]
fn a_drive_goes_to_ringdisk_and_comes_back() {
    let request = request(&[], None);
    let changed = enable(VM, &request).unwrap();
    let expected = "#ringdisk%3A scsi0%3A local%3A100/vm-100-disk-0.qcow2,discard=on,iops_rd=500,mbps=10.5,size=8G\n\
            agent: 1\n\
            args: -object memory-backend-memfd,id=ringdisk-memory,size=2048M,share=on -machine memory-backend=ringdisk-memory \
            -chardev socket,id=ringdisk-scsi0,path=/run/ringdisk/vm-100-scsi0.sock,reconnect-ms=1000 \
            -device vhost-user-blk-pci,id=ringdisk-dev-scsi0,chardev=ringdisk-scsi0,num-queues=4,queue-size=256,bus=pci.2,addr=0x19,bootindex=100\n\
            boot: order=scsi0;net0\ncores: 4\nhookscript: local:snippets/ringdisk\nmemory: 2048\n\
            net0: virtio=BC:24:11:00:00:01,bridge=vmbr0\nostype: l26\nscsihw: virtio-scsi-single\nsmbios1: uuid=1\n\
            unused0: local:100/vm-100-disk-0.qcow2\n";
    assert_eq!(changed.text, expected);
    let served = served(&changed.text, &request).unwrap();
    assert_eq!(served.len(), 1);
    assert_eq!(served[0].volume, "local:100/vm-100-disk-0.qcow2");
    assert_eq!(served[0].socket, "/run/ringdisk/vm-100-scsi0.sock");
    let key = |wanted: &str| {
        let found = served[0].keys.iter().find(|(key, _)| key == wanted);
        found.map(|(_, value)| value.as_str())
    };
    assert_eq!(key("format"), Some("qcow2"));
    assert_eq!(key("queues"), Some("4"));
    assert_eq!(key("iops-rd"), Some("500"));
    assert_eq!(key("bps"), Some("11010048"));
    assert_eq!(disable(&changed.text, &request).unwrap().text, VM);
    assert_eq!(without_ringdisk(&changed.text).unwrap(), VM);
    let again = enable(&changed.text, &request).unwrap_err();
    assert!(again.contains("no drive"), "{again}");
}

/// The stored configuration is one that Proxmox restores: all that belongs to this host or to ringdisk is absent.
#[test]
fn a_backup_has_what_proxmox_restores() {
    let request = request(&[], None);
    let others = "efidisk0: local-lvm:vm-100-disk-1,size=4M\nide2: local:iso/debian.iso,media=cdrom\nlock: backup\n\
                  scsi1: /dev/sdb,backup=0\ntpmstate0: local:100/vm-100-disk-2.qcow2,size=4M\nunused7: local-lvm:vm-100-disk-9\n";
    let changed = enable(VM, &request).unwrap().text + others + "[PENDING]\nmemory: 4096\n";
    let all = backup(&changed, &request).unwrap();
    let expected = VM.to_owned()
        + "efidisk0: local-lvm:vm-100-disk-1,size=4M\nide2: local:iso/debian.iso,media=cdrom\nscsi1: /dev/sdb,backup=0\n\
           tpmstate0: local:100/vm-100-disk-2.qcow2,size=4M\n\
           #qmdump#map:scsi0:drive-scsi0:local:qcow2:\n#qmdump#map:efidisk0:drive-efidisk0:local-lvm:raw:\n\
           #qmdump#map:tpmstate0:drive-tpmstate0-backup:local:qcow2:\n";
    let sorted = |text: &str| text.lines().map(str::to_owned).collect::<BTreeSet<_>>();
    assert_eq!(sorted(&all.config), sorted(&expected));
    let disks: Vec<_> = all.devices.iter().map(|it| it.disk.as_deref()).collect();
    assert_eq!(disks, [Some("vm-100-scsi0"), None, None]);
    assert_eq!(all.left_out, ["scsi1"]);
    assert!(all.has_agent);
    let without = changed.replace("agent: 1", "agent: enabled=1,freeze-fs-on-backup=0");
    assert!(!backup(&without, &request).unwrap().has_agent);

    let refused = |text: &str, why: &str| {
        let error = backup(text, &request).unwrap_err();
        assert!(error.contains(why), "{error}");
    };
    refused(VM, "vzdump");
    refused(&changed.replace(",backup=0", ""), "scsi1");
    refused(
        &changed.replace(",size=8G", ",backup=0,size=8G"),
        "all its disks",
    );
}

/// What is not Proxmox' own drive: an image of the host, a device that was added by hand, another amount of memory.
#[test]
fn what_cannot_be_served_has_a_reason() {
    let request = request(&[], None);
    for file in ["/dev/disk/by-id/x", "/images/x.qcow2"] {
        let text = VM.replace("local:100/vm-100-disk-0.qcow2", file);
        let error = enable(&text, &request).unwrap_err();
        assert!(error.contains("no volume of a storage"), "{error}");
    }
    let changed = enable(VM, &request).unwrap().text;
    assert_eq!(other_devices(&changed), Vec::<String>::new());
    let by_hand =
        "-chardev socket,id=c,path=/run/ringdisk/c.sock -device vhost-user-blk-pci,chardev=c";
    for text in [&changed, VM] {
        let text = match text.contains("args: ") {
            true => text.replace("args: ", &format!("args: {by_hand} ")),
            false => format!("args: {by_hand}\n{text}"),
        };
        assert_eq!(other_devices(&text), ["/run/ringdisk/c.sock"]);
        assert!(backup(&text, &request).is_err());
    }
    assert_eq!(check_memory(&changed, &request), Ok(()));
    assert_eq!(check_memory(VM, &request), Ok(()));
    let more = changed.replace("memory: 2048", "memory: 4096");
    let error = check_memory(&more, &request).unwrap_err();
    assert!(error.contains("4096") && error.contains("2048"), "{error}");

    let locked = lock_for_backup(VM).unwrap();
    assert!(locked.contains("lock: backup\n"), "{locked}");
    assert!(
        lock_for_backup(&locked)
            .unwrap_err()
            .contains("locked (backup)")
    );
    assert_eq!(unlock_after_backup(&locked), VM);
}

/// What Proxmox' own programs may do to the configuration meanwhile.
#[test]
fn changes_by_proxmox_are_kept() {
    let request = request(&[], None);
    let text = enable(VM, &request).unwrap().text;
    let text = text
        .replace("agent: 1", "agent: 0")
        .replace("memory: 2048", "memory: 4096");
    let text = format!("#my%3A notes\n{text}");
    let back = disable(&text, &request).unwrap().text;
    let expected = VM
        .replace("agent: 1", "agent: 0")
        .replace("memory: 2048", "memory: 4096");
    assert_eq!(back, format!("#my%3A notes\n{expected}"));
    for (missing, word) in [
        ("#ringdisk%3A scsi0", "#other"),
        ("unused0: local:100/vm-100-disk-0.qcow2\n", ""),
    ] {
        let broken = text.replace(missing, word);
        assert!(served(&broken, &request).is_err(), "{missing}");
    }
}

#[test]
fn what_cannot_be_carried_is_refused() {
    for (from, to, word) in [
        ("ostype: l26", "ostype: win11", "INACCESSIBLE BOOT DEVICE"),
        ("memory: 2048\n", "memory: 2048\nnuma: 1\n", "hugepages"),
        (
            "smbios1: uuid=1\n",
            "smbios1: uuid=1\n[before]\ncores: 4\n",
            "snapshot",
        ),
        (
            "smbios1: uuid=1\n",
            "smbios1: uuid=1\n[PENDING]\nscsi0: none\n",
            "PENDING",
        ),
        ("cores: 4\n", "cores: 4\nlock: backup\n", "locked"),
        ("size=8G", "wwn=0x5000c500a0b0c0d0,size=8G", "wwn"),
        ("disk-0.qcow2", "disk-0.vmdk", "raw nor qcow2"),
        (
            "cores: 4\n",
            "cores: 4\nhookscript: local:snippets/mine.sh\n",
            "--own-hookscript",
        ),
        ("cores: 4\n", "cores: 4\ncores: 8\n", "two lines"),
    ] {
        let text = VM.replace(from, to);
        assert_ne!(text, VM, "{from}");
        let problem = enable(&text, &request(&[], None)).unwrap_err();
        assert!(problem.contains(word), "{word}: {problem}");
    }
    let named = ["scsi1".to_owned()];
    let problem = enable(VM, &request(&named, None)).unwrap_err();
    assert!(problem.contains("no drive scsi1"), "{problem}");
}

#[test]
fn memory_that_is_shared_stays_as_it_is() {
    for more in ["hugepages: 2\nnuma: 1\n", "virtiofs0: dirid=a\n"] {
        let text = enable(&format!("{VM}{more}"), &request(&[], None))
            .unwrap()
            .text;
        assert!(!text.contains("memfd"), "{text}");
    }
}

/// Each disk of the corpus that can be converted comes back byte for byte.
#[test]
fn corpus_comes_back() {
    let storages = corpus().join("storage.cfg");
    let storages = Source::new("storage.cfg", fs::read_to_string(storages).unwrap());
    let mut converted = 0;
    for file in fs::read_dir(corpus()).unwrap() {
        let path = file.unwrap().path();
        if path.extension().is_none_or(|end| end != "conf") {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let request = request(&[], Some(&storages));
        let Ok(changed) = enable(&text, &request) else {
            continue;
        };
        converted += 1;
        assert!(
            !served(&changed.text, &request).unwrap().is_empty(),
            "{}",
            path.display()
        );
        let back = disable(&changed.text, &request).unwrap();
        assert_eq!(back.text, text, "{}", path.display());
    }
    assert!(converted >= 10, "{converted}");
}

proptest! {
    /// A description may hold anything.
    #[test]
    fn text_survives_a_description(text in "[^\n]{0,60}") {
        prop_assert_eq!(decoded(&encoded(&text)), text);
    }

    #[test]
    fn any_text_is_read(text in "(#ringdisk: [a-z]{2,6}[0-9]: [^\n]{0,20}\n|[a-z]{2,9}[0-9]?: [^\n]{0,30}\n|[^\n]{0,20}\n){0,12}") {
        let request = request(&[], None);
        let _ = served(&text, &request);
        let _ = without_ringdisk(&text);
        let _ = backup(&text, &request);
        if let Ok(changed) = enable(&text, &request) {
            prop_assert!(served(&changed.text, &request).is_ok());
            prop_assert!(disable(&changed.text, &request).is_ok());
        }
    }
}

#[test]
fn the_way_to_snippets_is_told() {
    let storages = "dir: local\n\tpath /var/lib/vz\n\tcontent iso,backup\n\nlvmthin: thin\n\tvgname pve\n\n\
        dir: bare\n\tpath /x\n\nnfs: nas\n\tpath /mnt/nas\n\tcontent snippets,iso\n";
    assert_eq!(
        snippets(storages, "nas").as_deref(),
        Ok("/mnt/nas/snippets")
    );
    for (storage, says) in [
        ("local", "'pvesm set local --content iso,backup,snippets'"),
        ("bare", "'pvesm set bare --content images,rootdir,snippets'"),
        ("thin", "has no directory"),
        ("other", "no storage other"),
    ] {
        let why = snippets(storages, storage).unwrap_err();
        assert!(why.contains(says) && why.contains("--snippets"), "{why}");
    }
}
