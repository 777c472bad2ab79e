"""Checks of the machine: processor, memory, limits, clocks, disk, GPU."""

from __future__ import annotations

from fovea.doctor.check import GIB, MIB, Check, Verdict, failed, not_applicable, passed, plural, size, warned
from fovea.doctor.machine import cache_home
from fovea.doctor.subject import Subject

LEAST_MEMORY = GIB
LEAST_DISK = 256 * MIB
THROTTLED = 0.05
FAST_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "xen")
REMOTE = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "fuse.gcsfuse", "ceph")


def instruction_set(subject: Subject) -> Verdict:
    """Does the processor have instructions for which Fovea has kernels, and may it use AMX if it has it?"""
    facts = subject.kernels()
    if facts.gpus:
        return not_applicable("the model runs on a GPU")
    if not facts.instruction_set:
        return warned(
            "none of AVX2, AVX-512 and NEON, or turned off",
            "torch computes in float32, which is several times slower",
            "use a processor with AVX2 or NEON, and unset FOVEA_NATIVE_KERNELS",
        )
    if facts.amx_refusal:
        return warned(
            f"{facts.instruction_set}; {facts.amx_refusal}",
            "with AMX, which this processor has, prompts and images are computed faster by far, but the "
            "operating system refuses it",
            "use Linux 5.16 or later, without a sandbox that hides AMX (gVisor does)",
        )
    return passed(facts.instruction_set)


def native_kernels(subject: Subject) -> Verdict:
    """Are the C++ kernels compiled and loadable?"""
    facts = subject.kernels()
    if facts.gpus or not facts.instruction_set:
        return not_applicable("they are not used here")
    if facts.failure:
        return warned(
            facts.failure,
            "without them torch computes, which is slower",
            "install g++, or a wheel, which holds the kernels compiled",
        )
    return passed("compiled and loaded")


def threads(subject: Subject) -> Verdict:
    """Does the model use one thread per core?"""
    cores = subject.machine.cores()
    wanted = int(subject.setting("threads")) if subject.settings is not None else 0
    figure = f"{plural(cores, 'core')}, threads: {wanted or 'one each'}"
    if wanted > cores:
        return failed(figure, "threads beyond the cores make each other wait", "--threads 0")
    if 0 < wanted < cores:
        return warned(figure, f"{cores - wanted} cores are left idle", "--threads 0")
    return passed(figure)


def other_load(subject: Subject) -> Verdict:
    """Do other programs leave the cores free?"""
    text = subject.machine.text("/proc/loadavg")
    if text is None:
        return not_applicable("/proc/loadavg cannot be read")
    load, cores = float(text.split()[1]), subject.machine.cores()
    figure = f"{load:.1f} programs want to run on {plural(cores, 'core')} (mean of 5 minutes)"
    if load > cores:
        return warned(
            figure, "times measured now are those of a busy machine", "end the other programs, or wait"
        )
    return passed(figure)


def memory(subject: Subject) -> Verdict:
    """Is memory free?"""
    free = subject.machine.free_memory()
    figure = f"{size(free)} can be allocated"
    if free < LEAST_MEMORY:
        return failed(
            figure, "less than 1 GiB, and the KV pool gets a quarter of it", "free memory, or raise the limit"
        )
    return passed(figure)


def swap(subject: Subject) -> Verdict:
    """Is no memory swapped out?"""
    values = _meminfo(subject.machine.text("/proc/meminfo") or "")
    if "SwapTotal" not in values:
        return not_applicable("/proc/meminfo does not tell")
    used = values["SwapTotal"] - values.get("SwapFree", 0)
    figure = f"{size(used)} of {size(values['SwapTotal'])} used"
    if used > 64 * MIB:
        return warned(
            figure, "a weight that is swapped out delays every token", "free memory, then: swapoff -a"
        )
    return passed(figure)


def huge_pages(subject: Subject) -> Verdict:
    """May the kernel back weights and KV with huge pages?"""
    text = subject.machine.text("/sys/kernel/mm/transparent_hugepage/enabled")
    if text is None:
        return not_applicable("the kernel has no transparent huge pages")
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen == "never":
        return warned(
            chosen,
            "large arrays then take many entries of the TLB",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    return passed(chosen)


def cgroup_memory(subject: Subject) -> Verdict:
    """Has the cgroup's memory limit ended no process?"""
    limits, kills = [], 0
    for folder in subject.machine.cgroup("memory"):
        limit = subject.machine.text(f"{folder}/memory.max")
        if limit is not None and limit.strip().isdigit():
            limits.append(int(limit))
        kills += _count(subject.machine.text(f"{folder}/memory.events"), "oom_kill")
    if not limits:
        return not_applicable("no cgroup limits the memory")
    figure = f"limit {size(min(limits))}, {plural(kills, 'process', 'processes')} ended for lack of memory"
    if kills:
        return warned(
            figure,
            "the limit is too low for what runs in it",
            "raise the container's memory limit, or lower --kv-cache-mib",
        )
    return passed(figure)


def cgroup_cpu(subject: Subject) -> Verdict:
    """Does the cgroup's processor limit leave the server at full speed?"""
    for folder in subject.machine.cgroup("cpu"):
        stat = subject.machine.text(f"{folder}/cpu.stat")
        periods = _count(stat, "nr_periods")
        if not periods:
            continue
        share = _count(stat, "nr_throttled") / periods
        figure = f"stopped in {share:.0%} of {periods} periods"
        if share > THROTTLED:
            return warned(
                figure,
                "threads that use up the limit are stopped until the next period",
                "raise the container's CPU limit, or set --threads to whole CPUs of it",
            )
        return passed(figure)
    return not_applicable("no cgroup limits the processor")


def clock(subject: Subject) -> Verdict:
    """Is the kernel's clock a fast one?"""
    text = subject.machine.text("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    if text is None:
        return not_applicable("the kernel does not tell its clock")
    name = text.strip()
    if name not in FAST_CLOCKS:
        return warned(
            name,
            "reading this clock takes a microsecond or more, many times per step",
            "echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource",
        )
    return passed(name)


def frequency(subject: Subject) -> Verdict:
    """Does the processor run at its full frequency?"""
    text = subject.machine.text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if text is None:
        return not_applicable("the system does not control the frequency, as in most virtual machines")
    if text.strip() == "powersave" and not subject.machine.text(
        "/sys/devices/system/cpu/intel_pstate/status"
    ):
        return warned(
            "powersave",
            "the processor stays at its lowest frequency",
            "cpupower frequency-set -g performance",
        )
    return passed(text.strip())


def cache_disk(subject: Subject) -> Verdict:
    """Can the folders of caches be written, and have they room?"""
    folder = str(subject.setting("embed_disk_dir")) if subject.settings is not None else ""
    wanted = int(subject.setting("embed_disk_mib")) * MIB if folder else LEAST_DISK
    place = folder or cache_home()
    try:
        disk = subject.machine.disk(place)
    except OSError as error:
        return failed(place, f"it cannot be examined: {error.strerror}", "--embed-disk-dir FOLDER")
    figure = f"{place}: {size(disk.free)} free on {disk.kind or 'an unknown file system'}"
    if not disk.writable:
        return failed(figure, "it cannot be written", f"chown it to the server's user: {place}")
    if disk.free < wanted:
        return failed(figure, f"{size(wanted)} are needed", "free space, or lower --embed-disk-mib")
    if disk.kind in REMOTE:
        return warned(figure, "a network's latency is part of every hit", "use a local disk")
    return passed(figure)


def open_files(subject: Subject) -> Verdict:
    """May the server open as many files as it has connections?"""
    limit = subject.machine.open_files()
    wanted = int(subject.setting("max_connections")) if subject.settings is not None else 1024
    figure = f"{'no limit' if limit < 0 else limit} for {wanted} connections"
    if 0 <= limit < 2 * wanted:
        return warned(
            figure, "a connection takes a file, and a download another", f"ulimit -n {max(65536, 2 * wanted)}"
        )
    return passed(figure)


def gpu_driver(subject: Subject) -> Verdict:
    """Does the driver of the GPU work?"""
    if subject.machine.text("/proc/driver/nvidia/version") is None:
        return not_applicable("there is no NVIDIA GPU")
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    output = subject.machine.output(command)
    if not output or not output.strip():
        return failed("nvidia-smi fails", "the driver does not reach the GPU", "reinstall the driver")
    return passed("; ".join(line.strip() for line in output.strip().splitlines()))


def cuda(subject: Subject) -> Verdict:
    """Can torch use the GPU?"""
    facts = subject.kernels()
    if subject.settings is not None and str(subject.setting("device")).startswith("cpu"):
        return not_applicable("the settings choose the CPU")
    if subject.machine.text("/proc/driver/nvidia/version") is None and not facts.gpus:
        return not_applicable("there is no NVIDIA GPU")
    figure = f"torch is built for {'CUDA ' + facts.cuda_build if facts.cuda_build else 'CPUs'}"
    if not facts.gpus:
        return failed(
            figure, "it uses none of this machine's GPUs", "install torch's build for the driver's CUDA"
        )
    return passed(f"{figure}, {plural(facts.gpus, 'GPU')}")


def gpus(subject: Subject) -> Verdict:
    """Is every GPU used?"""
    count = subject.kernels().gpus
    if not count:
        return not_applicable("no GPU is used")
    if count > 1:
        return warned(
            plural(count, "GPU"),
            "a server uses one GPU",
            "start a server for each GPU, with CUDA_VISIBLE_DEVICES, behind `fovea gateway`",
        )
    return passed("1 GPU")


def _meminfo(text: str) -> dict[str, int]:
    """Return the bytes of each line of /proc/meminfo."""
    values = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if rest.split() and rest.split()[0].isdigit():
            values[name] = int(rest.split()[0]) * 1024
    return values


def _count(text: str | None, name: str) -> int:
    """Return the number behind a name in a file of lines "NAME NUMBER"; 0 if there is none."""
    for line in (text or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return 0


CHECKS = (
    Check("machine", "instruction-set", "vector instructions", instruction_set),
    Check("machine", "native-kernels", "C++ kernels", native_kernels),
    Check("machine", "threads", "threads per core", threads),
    Check("machine", "other-load", "other programs", other_load),
    Check("machine", "memory", "free memory", memory),
    Check("machine", "swap", "swapped memory", swap),
    Check("machine", "huge-pages", "huge pages", huge_pages),
    Check("machine", "cgroup-memory", "memory limit of the cgroup", cgroup_memory),
    Check("machine", "cgroup-cpu", "processor limit of the cgroup", cgroup_cpu),
    Check("machine", "clock", "clock of the kernel", clock),
    Check("machine", "frequency", "frequency of the processor", frequency),
    Check("machine", "cache-disk", "disk of the caches", cache_disk),
    Check("machine", "open-files", "limit of open files", open_files),
    Check("machine", "gpu-driver", "driver of the GPU", gpu_driver),
    Check("machine", "cuda", "CUDA of torch", cuda),
    Check("machine", "gpus", "use of all GPUs", gpus),
)
