# Tries what the unit forbids, and writes a line with the result of each attempt. System call numbers are those of x86-64.
use strict;
use Socket qw(AF_UNIX AF_INET AF_INET6 SOCK_STREAM SOCK_RAW);
my ($result, $folder) = @ARGV;
open my $out, '>', $result or die "$result: $!";
sub tried { my ($what, $worked) = @_; print $out "$what: ", $worked ? 'works' : "$!", "\n"; }
sub call { return syscall($_[0], @_[1 .. $#_]) >= 0; }

# mmap: private, anonymous
tried('memory to write and execute', call(9, 0, 4096, 1 | 2 | 4, 0x22, -1, 0));
tried('memory to write', call(9, 0, 4096, 1 | 2, 0x22, -1, 0));
tried('netlink', socket(my $netlink, 16, SOCK_RAW, 0));
tried('unix', socket(my $unix, AF_UNIX, SOCK_STREAM, 0));
tried('inet', socket(my $inet, AF_INET, SOCK_STREAM, 0));
tried('inet6', socket(my $inet6, AF_INET6, SOCK_STREAM, 0));
# unshare: CLONE_NEWUSER, in a child, since it changes the process
tried('a namespace', in_child(sub { call(272, 0x10000000) }));
# personality: ADDR_NO_RANDOMIZE
tried('another personality', in_child(sub { call(135, 0x0040000) }));
# ptrace: PTRACE_TRACEME, which is not in @system-service
tried('to be traced', in_child(sub { call(101, 0, 0, 0, 0) }));
tried('set-user-ID', (open(my $file, '>', "$folder/set-user-id") and chmod(04755, "$folder/set-user-id")));
unlink "$folder/set-user-id";
my $parameters = "\0" x 120;
tried('io_uring', call(425, 1, $parameters));
tried('Linux AIO', call(206, 1, my $context = "\0" x 8));
tried('CPU affinity', call(204, 0, 8, my $cpus = "\0" x 8));

sub in_child {
    my ($try) = @_;
    my $pid = fork() // die "fork: $!";
    exit($try->() ? 0 : 0 + $!) if $pid == 0;
    waitpid($pid, 0);
    $! = $? >> 8;
    return $? == 0;
}
