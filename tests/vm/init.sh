#!/bin/busybox sh
# First process of the guest: the host's files read-only, fresh file systems where something is written.
/bin/busybox mkdir -p /dev /proc /lower /root
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs devtmpfs /dev
# Nothing is built in; the file lists the modules of the shared file system in the order in which they load.
while read -r module; do
    /bin/busybox insmod "/modules/$module"
done </modules/order
/bin/busybox mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=262144,cache=loose root /root
/bin/busybox mount --bind /root /lower
/bin/busybox mount -t proc proc /root/proc
/bin/busybox mount -t sysfs sysfs /root/sys
/bin/busybox mount -t devtmpfs devtmpfs /root/dev
for directory in tmp run var/lib; do
    /bin/busybox mount -t tmpfs -o mode=0755 tmpfs "/root/$directory"
done
/bin/busybox chmod 1777 /root/tmp
# What the tests are made of may lie below a directory that was just covered.
while read -r path; do
    if [ ! -d "/root$path" ]; then
        /bin/busybox mkdir -p "/root$path"
        /bin/busybox mount --bind "/lower$path" "/root$path"
    fi
done </needed
/bin/busybox cp /guest.sh /root/tmp/guest.sh
# In place of this process: the kernel's own helpers (modprobe) take their root from process 1.
exec /bin/busybox chroot /root /bin/bash /tmp/guest.sh </dev/null
