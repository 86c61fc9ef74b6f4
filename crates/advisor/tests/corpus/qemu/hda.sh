kvm -m 2048 -smp 2 -hda /vms/old.qcow2 -cdrom /iso/x.iso
