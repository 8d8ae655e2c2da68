"""The filter of system calls for foreign code, which bubblewrap installs (`--seccomp`).

These fail with EPERM: new processes and threads, sockets, memory that the address space limit does not count, other
processes' memory, mounts and name spaces, and rarely used parts of the kernel with many past vulnerabilities. Processes
are refused here because the kernel's own limit on them does not apply to root. All other calls are allowed, so that any
Python starts.

Numbers: linux/arch/x86/entry/syscalls/syscall_64.tbl and linux/include/uapi/asm-generic/unistd.h.
"""

import struct
from typing import Final

_KILL: Final = 0x80000000  # SECCOMP_RET_KILL_PROCESS
_ALLOW: Final = 0x7FFF0000  # SECCOMP_RET_ALLOW
_EPERM: Final = 0x00050000 | 1  # SECCOMP_RET_ERRNO

_LOAD: Final = 0x20  # BPF_LD | BPF_W | BPF_ABS
_EQUAL: Final = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_AT_LEAST: Final = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_RETURN: Final = 0x06  # BPF_RET | BPF_K

_NUMBER_OFFSET: Final = 0  # of seccomp_data.nr
_ARCHITECTURE_OFFSET: Final = 4  # of seccomp_data.arch
_X32: Final = 0x40000000

_BOTH: Final = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_open": 434,
    "clone3": 435,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "memfd_secret": 447,
}

_X86_64: Final = _BOTH | {
    "shmget": 29,
    "shmat": 30,
    "socket": 41,
    "socketpair": 53,
    "clone": 56,
    "fork": 57,
    "vfork": 58,
    "semget": 64,
    "msgget": 68,
    "ptrace": 101,
    "syslog": 103,
    "personality": 135,
    "modify_ldt": 154,
    "pivot_root": 155,
    "chroot": 161,
    "acct": 163,
    "mount": 165,
    "umount2": 166,
    "swapon": 167,
    "reboot": 169,
    "iopl": 172,
    "ioperm": 173,
    "init_module": 175,
    "delete_module": 176,
    "quotactl": 179,
    "mbind": 237,
    "set_mempolicy": 238,
    "mq_open": 240,
    "kexec_load": 246,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "inotify_init": 253,
    "migrate_pages": 256,
    "unshare": 272,
    "vmsplice": 278,
    "move_pages": 279,
    "inotify_init1": 294,
    "perf_event_open": 298,
    "fanotify_init": 300,
    "name_to_handle_at": 303,
    "open_by_handle_at": 304,
    "setns": 308,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "kcmp": 312,
    "finit_module": 313,
    "memfd_create": 319,
    "kexec_file_load": 320,
    "bpf": 321,
    "userfaultfd": 323,
}

_AARCH64: Final = _BOTH | {
    "inotify_init1": 26,
    "umount2": 39,
    "mount": 40,
    "pivot_root": 41,
    "chroot": 51,
    "quotactl": 60,
    "vmsplice": 75,
    "acct": 89,
    "personality": 92,
    "unshare": 97,
    "kexec_load": 104,
    "init_module": 105,
    "delete_module": 106,
    "syslog": 116,
    "ptrace": 117,
    "reboot": 142,
    "mq_open": 180,
    "msgget": 186,
    "semget": 190,
    "shmget": 194,
    "shmat": 196,
    "socket": 198,
    "socketpair": 199,
    "add_key": 217,
    "request_key": 218,
    "keyctl": 219,
    "clone": 220,
    "swapon": 224,
    "mbind": 235,
    "set_mempolicy": 237,
    "migrate_pages": 238,
    "move_pages": 239,
    "perf_event_open": 241,
    "fanotify_init": 262,
    "name_to_handle_at": 264,
    "open_by_handle_at": 265,
    "setns": 268,
    "process_vm_readv": 270,
    "process_vm_writev": 271,
    "kcmp": 272,
    "finit_module": 273,
    "memfd_create": 279,
    "bpf": 280,
    "userfaultfd": 282,
    "kexec_file_load": 294,
}

_MACHINES: Final = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _AARCH64)}

machines: Final = tuple(_MACHINES)
"""The machines that have a filter, by the names of `platform.machine`."""


def build_filter(machine: str) -> bytes:
    """Return the filter of a machine: struct sock_filter[], little-endian as the machine."""
    architecture, calls = _MACHINES[machine]
    numbers = sorted(calls.values())
    count = len(numbers)
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_OFFSET),
        (_AT_LEAST, count + 1, 0, _X32),  # x32: x86-64 calls under other numbers
    ]
    program += [(_EQUAL, count - place, 0, number) for place, number in enumerate(numbers)]
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _EPERM)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
