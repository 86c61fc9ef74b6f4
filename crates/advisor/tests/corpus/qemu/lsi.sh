qemu-system-x86_64 -accel kvm -device lsi53c895a,id=scsi0 -drive file=/dev/vg0/a,format=raw,if=none,id=a,cache=none,aio=native,discard=unmap -device scsi-hd,bus=scsi0.0,drive=a
