qemu-system-x86_64 -accel kvm -M q35 -drive file=/dev/vg0/a,format=raw,if=none,id=a,cache=none,aio=native,discard=unmap -device ide-hd,drive=a,bus=ide.0
