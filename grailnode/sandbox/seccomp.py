"""The filter of system calls for foreign code, which bubblewrap installs (`--seccomp`).

These fail with EPERM: new processes and threads, sockets, memory that the address space limit does not count, other
processes' memory, mounts and name spaces, and rarely used parts of the kernel with many past vulnerabilities. Processes
are refused here because the kernel's own limit on them does not apply to root. All other calls are allowed, so that any
Python starts.

Numbers: linux/arch/x86/entry/syscalls/syscall_64.tbl and linux/include/uapi/asm-generic/unistd.h.
"""

import struct
from typing import Final, Literal

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

_CALLS: Final[
    dict[str, tuple[int, int | None]]
] = {  # numbers on x86_64 and on aarch64; None where there is no such call
    "shmget": (29, 194),
    "shmat": (30, 196),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "clone": (56, 220),
    "fork": (57, None),
    "vfork": (58, None),
    "semget": (64, 190),
    "msgget": (68, 186),
    "ptrace": (101, 117),
    "syslog": (103, 116),
    "personality": (135, 92),
    "modify_ldt": (154, None),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "acct": (163, 89),
    "mount": (165, 40),
    "umount2": (166, 39),
    "swapon": (167, 224),
    "reboot": (169, 142),
    "iopl": (172, None),
    "ioperm": (173, None),
    "init_module": (175, 105),
    "delete_module": (176, 106),
    "quotactl": (179, 60),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "mq_open": (240, 180),
    "kexec_load": (246, 104),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "inotify_init": (253, None),
    "migrate_pages": (256, 238),
    "unshare": (272, 97),
    "vmsplice": (278, 75),
    "move_pages": (279, 239),
    "inotify_init1": (294, 26),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "setns": (308, 268),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "finit_module": (313, 273),
    "memfd_create": (319, 279),
    "kexec_file_load": (320, 294),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "pidfd_open": (434, 434),
    "clone3": (435, 435),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "mount_setattr": (442, 442),
    "memfd_secret": (447, 447),
}

_STARTS: Final = {"clone", "fork", "vfork"}
_SIGNALS: Final[dict[str, tuple[int, int | None]]] = {
    "kill": (62, 129),
    "rt_sigqueueinfo": (129, 138),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "prlimit64": (302, 261),  # it sets the limits of other processes
    "setpriority": (140, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "ioprio_set": (251, 30),
    "sched_setattr": (314, 274),
}

_FCNTL: Final = tuple(  # of fcntl, three commands by which the kernel sends a signal of one's choice to another process
    ((_EQUAL, 0, 4, fcntl), (_LOAD, 0, 0, 24), (_EQUAL, 3, 0, 8), (_EQUAL, 2, 0, 10), (_EQUAL, 1, 0, 15))
    for fcntl in (72, 25)
)

_SET: Final = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_NAME_SPACES: Final = 0x7E020080  # flags of clone that make name spaces
_CLONE: Final = tuple(((_EQUAL, 0, 2, clone), (_LOAD, 0, 0, 16), (_SET, 1, 0, _NAME_SPACES)) for clone in (56, 220))

Kind = Literal["program", "host", "fork"]

_ARCHITECTURES: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

machines: Final = tuple(_ARCHITECTURES)
"""The machines that have a filter, by the names of `platform.machine`."""


def build_filter(machine: str, kind: Kind = "program") -> bytes:
    """Return the filter of a machine: struct sock_filter[], little-endian as the machine. A "host" may start processes,
    in no name spaces of their own. A "fork" of it, which shares its name space of processes with others, sends no
    signals either, and slows none of them down.
    """
    column = machines.index(machine)
    calls = {name: call[column] for name, call in (_CALLS | (_SIGNALS if kind == "fork" else {})).items()}
    refused = calls.keys() - (_STARTS if kind == "host" else set())
    numbers = sorted(number for name in refused if (number := calls[name]) is not None)
    count = len(numbers)
    commands: tuple[tuple[int, int, int, int], ...] = ()
    if kind != "program":
        commands = _FCNTL[column] if kind == "fork" else _CLONE[column]
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_OFFSET),
        (_AT_LEAST, count + len(commands) + 1, 0, _X32),  # x32: x86-64 calls under other numbers
    ]
    program += [(_EQUAL, count + len(commands) - place, 0, number) for place, number in enumerate(numbers)]
    program += commands
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _EPERM)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
