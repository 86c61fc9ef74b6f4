qemu-system-x86_64 -enable-kvm -M q35 -smp 4 -m 8G \
  -object iothread,id=io0 -device virtio-scsi-pci,id=scsi0,iothread=io0 \
  -drive file=/dev/vg0/vm1,format=raw,if=none,id=d1,cache=none,aio=native,discard=unmap \
  -device scsi-hd,bus=scsi0.0,drive=d1
