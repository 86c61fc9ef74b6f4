qemu-kvm -M pc -mem-path /hugepages -m 7168 -cpu qemu64,+x2apic -smp 40 \
  -drive if=none,id=drive0,cache=none,aio=native,format=raw,file=/dev/sdc,discard=unmap \
  -device virtio-blk-pci,drive=drive0,scsi=off,config-wce=off,x-data-plane=on
