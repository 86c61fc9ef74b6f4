#!/bin/sh
# a desktop VM as launchers write it
qemu-system-x86_64 -name ubuntu,process=ubuntu -machine q35,smm=off,accel=kvm -cpu host -smp cores=4,threads=2,sockets=1 -m 8G \
  -device virtio-balloon -drive if=none,id=root,file=ubuntu/disk.qcow2,format=qcow2,cache=writeback,aio=threads \
  -device virtio-blk-pci,drive=root
