"""What failures look like in logs: one table from a line's pattern to its cause, by public wording of each component.

The classes follow ByteRobust's census of incidents (SOSP'25), finer where another action follows: a device that is
lost is replaced, a device that ran out of memory is not. `depth` says how far down the chain of causes a line
speaks: what hardware or the kernel reports explains what a library reports, and that explains what peers report.
Only patterns of one line: a log is cut anywhere. Order matters, the first pattern that fits a line is its meaning.
"""

from __future__ import annotations

import enum
import re

import msgspec


class Cause(str, enum.Enum):
    """Classes of causes. The comment names ByteRobust's class where it has another name."""

    HOST_MEMORY = "host-out-of-memory"  # CPU OOM
    DEVICE_MEMORY_FULL = "device-out-of-memory"
    DEVICE_MEMORY_BAD = "device-memory"  # GPU memory error: ECC, row remapping
    DEVICE_LOST = "device-lost"  # GPU unavailable
    DEVICE_LINK = "device-link"  # NVLink, NVSwitch
    DEVICE_ERROR = "device-error"  # CUDA error
    NCCL = "nccl"
    GLOO = "gloo"
    NETWORK = "network"  # InfiniBand
    DISK_SPACE = "disk-space"
    DISK = "disk"  # disk fault
    MOUNT = "mount"  # file-system mount
    REMOTE_STORAGE = "remote-storage"  # HDFS
    SHARED_MEMORY = "shared-memory"
    PERMISSION = "permission"
    CONTAINER = "container"
    DRIVER = "driver"
    HOST_FAULT = "host-fault"  # kernel panic
    HOST_LIMITS = "host-limits"  # CPU overload
    EXTERNAL = "external-service"
    HANG = "hang"
    NAN = "nan"
    DATA = "data"  # code/data restart
    CODE = "code"
    STOPPED = "stopped"  # taken away: pre-emption, time limit, maintenance
    UNKNOWN = "unknown"


class Depth(enum.IntEnum):
    """Lower explains higher. Times decide only within a depth."""

    MACHINE = 0  # hardware, kernel, platform: nothing in the job causes these
    OWN = 1  # a worker's own, specific failure
    GENERAL = 2  # a failure that others may have behind them: a bare I/O error, a loss that is no number
    PEER = 3  # what is said by those whose peer, device or network went away


class Signature(msgspec.Struct, frozen=True):
    cause: Cause
    depth: Depth
    confidence: float  # that this line means this cause, where nothing deeper is known
    pattern: re.Pattern[str]


def _sign(cause: Cause, depth: Depth, confidence: float, *patterns: str) -> Signature:
    return Signature(cause, depth, confidence, re.compile("|".join(patterns), re.IGNORECASE))


def _xids(*codes: int) -> str:
    """The driver's report of one of these errors (docs.nvidia.com/deploy/xid-errors)."""
    return rf"\bxid \([^)]*\):? *(?:{'|'.join(map(str, codes))})\b"


SIGNATURES: tuple[Signature, ...] = (
    # Words that look like a cause in a line that is only a consequence ------------------------------------
    _sign(
        Cause.HANG,
        Depth.PEER,
        0.6,
        r"watchdog caught collective operation timeout",
        r"failed to pass monitoredbarrier",
        r"some nccl operations have failed or timed out",
    ),
    _sign(Cause.NCCL, Depth.PEER, 0.4, r"remote process exited or there was a network error", r"ncclremoteerror"),
    # Machine ----------------------------------------------------------------------------------------------
    _sign(
        Cause.HOST_MEMORY,
        Depth.MACHINE,
        0.98,
        r"out of memory: kill(?:ed)? process",
        r"oom-kill:constraint",
        r"invoked oom-killer",
        r"\boomkilled\b",
        r"detected \d+ oom[_-]kill event",
        r"task \d+: out of memory",
        r"killed by the kernel, out of memory",
    ),
    _sign(
        Cause.DEVICE_MEMORY_BAD,
        Depth.MACHINE,
        0.97,
        _xids(48, 63, 64, 92, 94, 95, 140, 160, 171, 172),
        r"double bit ecc",
        r"uncorrectable ecc error",
        r"uncorrectable hardware errors? detected in umc",
        r"cudaerroreccuncorrectable",
        r"row remapp\w+ (?:failure|error)",
    ),
    _sign(
        Cause.DEVICE_LOST,
        Depth.MACHINE,
        0.97,
        _xids(79, 119, 120, 143),
        r"\bfallen off the bus\b",  # also without an Xid, and over several lines
        r"\bgpu is lost\b",
        r"gpuislost",
        r"unable to determine the device handle for gpu",
        r"amdgpu.*gpu reset.*failed",
        r"amdgpu.*(?:mode\d|asic) reset failed",
    ),
    _sign(
        Cause.DEVICE_LINK,
        Depth.MACHINE,
        0.95,
        _xids(74, 144, 145, 146, 147, 148, 149, 150),
        r"\bsxid\b[^,]*, fatal",
        r"nvlink: fatal error",
        r"uncorrectable nvlink error",
        r"peer gpu memory over nvlink or a hardware error",
        r"xgmi.*(?:fatal|uncorrectable)",
    ),
    _sign(
        Cause.HOST_FAULT,
        Depth.MACHINE,
        0.95,
        r"kernel panic - not syncing",
        r"\bhard lockup\b",
        r"soft lockup - cpu",
        r"machine check exception",
        r"\[hardware error\]: cpu \d+: machine check",
        r"general protection fault",
        r"handling mce memory error",
        r"\[hardware error\]: .*(?:fatal|uncorrected)",
        r"kernel bug at ",
        r"edac .*\b[1-9]\d* ue\b",
    ),
    _sign(
        Cause.NETWORK,
        Depth.MACHINE,
        0.93,
        r"net/ib.*got completion (?:with error|from peer)",
        r"got async event ?: (?:port error|.*fatal)",
        r"(?:nic |\bib\d+\b.*)?link is down\b",
        r"mlx[45]\w*.*\blink down\b",
        r"port module event\[error\]",
        r"mlx5.*(?:health (?:issue|compromised)|fatal error)",
        r"local work queue catastrophic",
        r"ibv_\w+ failed",
        r"transport retry counter exceeded",
    ),
    _sign(
        Cause.MOUNT,
        Depth.MACHINE,
        0.93,
        r"stale (?:nfs )?file handle",
        r"nfs: server .* not responding",
        r"\blustreerror\b.*evicted",
        r"client was evicted by",
        r"failedmount",
        r"mountvolume\.\w+ failed",
        r"mount\.\w+: .*(?:timed out|failed|denied)",
        r"\[errno 107\].*: '/",
        r"\[errno 108\]",
        r"ceph.*(?:mds|osd)\d* .*(?:hung|reconnect denied)",
    ),
    _sign(
        Cause.DISK,
        Depth.MACHINE,
        0.93,
        r"i/o error, dev ",
        r"critical medium error",
        r"nvme\d*: .*(?:timeout, aborting|device not ready|controller is down)",
        r"(?:ext4|xfs|btrfs).*(?:remounting filesystem read-only|metadata i/o error|forced shutdown)",
        r"ext4-fs error",
        r"failed result: hostbyte",
    ),
    _sign(
        Cause.DRIVER,
        Depth.OWN,
        0.93,
        r"driver/library version mismatch",
        r"driver on your system is too old",
        r"cuda driver version is insufficient",
        r"forward compatibility was attempted",
        r"system not yet initialized",
        r"no kernel image is available for execution",
        r"found no nvidia driver",
    ),
    _sign(
        Cause.CONTAINER,
        Depth.MACHINE,
        0.93,
        r"imagepullbackoff",
        r"errimagepull",
        r"failed to pull image",
        r"oci runtime (?:create|exec) failed",
        r"failed to create (?:shim task|containerd task|task for container)",
        r"nvidia-container-cli: ",
        r"\bevicted\b.*(?:kubelet|low on resource)",
        r"crashloopbackoff",
        r"createcontainer(?:config)?error",
        r"failedcreatepodsandbox",
        r"unexpectedadmissionerror",
        r"failedscheduling",
    ),
    _sign(
        Cause.STOPPED,
        Depth.MACHINE,
        0.9,
        r"cancelled at .* due to (?:preemption|time limit|node failure)",
        r"spot interruption notice",
        r"\bpreempt(?:ed|ion) notice",
        r"due to (?:host )?maintenance",
        r"^keyboardinterrupt\b",
    ),
    # A worker's own ---------------------------------------------------------------------------------------
    _sign(
        Cause.DEVICE_LOST,
        Depth.OWN,
        0.9,
        r"no cuda gpus are available",
        r"no cuda-capable device is detected",
        r"device\(s\) is/are busy or unavailable",
        r"no hip gpus are available",
        r"device >= 0 && device < num_gpus",
        r"failed to initialize nvml: (?:unknown error|gpu access blocked)",
        r"cuda error: (?:invalid device ordinal|unknown error)",
    ),
    _sign(
        Cause.DEVICE_MEMORY_FULL,
        Depth.OWN,
        0.97,
        r"(?:cuda|hip|xpu|npu) out of memory\. tried to allocate",
        r"(?:cuda|hip) error: out of memory",
        r"cublas_status_alloc_failed",
        r"cudnn_status_alloc_failed",
        r"cudaerrormemoryallocation",
        r"hiperroroutofmemory",
        r"nccl warn cuda failure (?:2 )?'out of memory'",
    ),
    _sign(
        Cause.HOST_LIMITS,
        Depth.OWN,
        0.93,
        r"too many open files",
        r"received \d+ items of ancdata",
        r"can't start new thread",
        r"resource temporarily unavailable",
        r"pthread_create failed",
        r"no child processes.*limit",
        r"cgroup: fork rejected",
    ),
    _sign(
        Cause.SHARED_MEMORY,
        Depth.OWN,
        0.95,
        r"insufficient shared memory",
        r"out of shared memory",
        r"unable to (?:allocate|mmap) shared memory",
        r"(?:failed to extend|no space left on device).*/dev/shm",
        r"/dev/shm.*no space left",
    ),
    _sign(
        Cause.DEVICE_ERROR,
        Depth.OWN,
        0.9,
        r"device-side assert",
        r"illegal memory access",
        r"misaligned address",
        r"err(?:or)? == (?:hip|cuda)success",
        r"\bcuda failure (?:\d+ )?'",
        r"ncclunhandledcudaerror",
        r"\bhiperror\w+",
        r"unhandled cuda error",
        r"illegal instruction was encountered",
        r"(?:cuda|hip) error: ",
        r"cublas_status_\w+",
        r"cudnn_status_\w+",
        r"cusolver_status_\w+",
        _xids(8, 13, 31, 32, 61, 62, 69, 109),
        r"memory access fault by gpu",
        r"hsa_status_error\w*",
        r"amdgpu.*(?:ring .* timeout|gpu reset begin)",
        r"cuda kernel .*assertion .* failed",
        r"amdgpu.*\bmes failed to respon[sd]",
        r"block: \[\d+,\d+,\d+\], thread: \[\d+,\d+,\d+\] assertion",
    ),
    _sign(
        Cause.HOST_MEMORY,
        Depth.OWN,
        0.9,
        r"defaultcpuallocator: .*(?:can't|cannot|not enough) (?:allocate )?memory",
        r"cannot allocate memory",
        r"\bmemoryerror\b",
        r"_arraymemoryerror",
        r"std::bad_alloc",
    ),
    _sign(Cause.HOST_MEMORY, Depth.OWN, 0.75, r"dataloader worker \(pid\(?s?\)? .*killed by signal: killed"),
    _sign(
        Cause.DISK_SPACE, Depth.OWN, 0.97, r"no space left on device", r"disk quota exceeded", r"\[errno (?:28|122)\]"
    ),
    _sign(Cause.DISK, Depth.OWN, 0.9, r"read-only file system"),
    _sign(
        Cause.PERMISSION,
        Depth.OWN,
        0.93,
        r"permission denied",
        r"permissionerror",
        r"operation not permitted",
        r"accessdenied",
        r"access denied",
        r"\b40[13] (?:client error|forbidden|unauthorized)",
        r"gatedrepoerror",
        r"invalidaccesskeyid",
        r"expiredtoken",
    ),
    _sign(
        Cause.REMOTE_STORAGE,
        Depth.OWN,
        0.9,
        r"could only be (?:written|replicated) to 0 ",
        r"could not obtain block",
        r"org\.apache\.hadoop\S*exception",
        r"hdfs\.\w+: .*(?:exception|error|failed)",
        r"namenode is in safe ?mode",
        r"botocore\.exceptions\.",
        r"\(slowdown\)",
        r"google\.api_core\.exceptions\.",
        r"azure\.core\.exceptions\.",
        r"s3fs.*error",
        r"(?:download|upload) failed: \w+://",
    ),
    _sign(
        Cause.EXTERNAL,
        Depth.OWN,
        0.85,
        r"\b5\d\d server error\b",
        r"wandb\.errors\.\w+",
        r"huggingface_hub\.\S*error",
        r"mlflow\.exceptions\.",
        r"license server",
        r"(?:urllib3|requests)\.exceptions\.\w*(?:timeout|connection|maxretry)\w*error",
        r"(?:max retries exceeded with url|readtimeout: https?)",
        r"couldn't reach https?://",
        r"remote end closed connection without response",
    ),
    _sign(
        Cause.NCCL,
        Depth.OWN,
        0.85,
        r"duplicate gpu detected",
        r"mismatched nccl versions",
        r"nccl warn message truncated",
        r"ncclinvalid\w+",
        r"nccl warn .*(?:bootstrap|failed to find|no interface|mismatch)",
    ),
    _sign(
        Cause.GLOO,
        Depth.OWN,
        0.85,
        r"unable to (?:find address for|resolve hostname to)",
        r"gloo connectfullmesh failed",
        r"ifa != nullptr",
    ),
    _sign(
        Cause.NETWORK,
        Depth.OWN,
        0.85,
        r"no route to host",
        r"network is (?:unreachable|down)",
        r"name resolution",
        r"name or service not known",
        r"failed to connect to any network address",
        r"address already in use",
    ),
    _sign(
        Cause.NAN,
        Depth.OWN,
        0.93,
        r"returned nan values in its \d+th output",
        r"found nan in",
        r"(?:loss|grad\w*)(?: norm)? (?:is|became|=+|:) ?(?:nan|inf)",
        r"floatingpointerror",
        r"loss scale already at minimum",
        r"non-?finite (?:loss|grad\w*)",
        r"(?:nan|inf) (?:or inf )?(?:detected|found|encountered) in",
    ),
    _sign(
        Cause.DATA,
        Depth.OWN,
        0.9,
        r"image file is truncated",
        r"unidentifiedimageerror",
        r"safetensorerror",
        r"jsondecodeerror",
        r"pytorchstreamreader failed",
        r"zlib\.error",
        r"badzipfile",
        r"badgzipfile",
        r"unicodedecodeerror",
        r"unpicklingerror",
        r"arrowinvalid",
        r"tarfile\.\w*error",
        r"lzmaerror",
        r"\bcrc mismatch",
        r"\beoferror\b",
        r"(?:corrupt(?:ed)?|truncated|damaged) (?:record|sample|shard|file|block)\b",
        r"parquet magic bytes not found",
        r"filenotfounderror",
        r"\[errno 2\] no such file",
    ),
    # General ----------------------------------------------------------------------------------------------
    _sign(Cause.DISK, Depth.GENERAL, 0.7, r"\[errno 5\]", r"input/output error"),
    _sign(Cause.DISK_SPACE, Depth.GENERAL, 0.6, r"pytorchstreamwriter failed writing", r"unexpected pos \d+ vs \d+"),
    _sign(Cause.DISK, Depth.GENERAL, 0.55, r"task .* blocked for more than \d+ seconds"),
    _sign(Cause.SHARED_MEMORY, Depth.GENERAL, 0.6, r"unable to open shared memory object"),
    _sign(Cause.NAN, Depth.GENERAL, 0.7, r"\bloss[ =:]+(?:nan|-?inf)\b"),
    _sign(
        Cause.CODE,
        Depth.GENERAL,
        0.9,
        r"(?:^|[\s:\]])(?:name|type|attribute|key|index|assertion|import|modulenotfound|syntax|indentation|zerodivision"
        r"|recursion|notimplemented|unboundlocal|value|lookup|overflow|typeguard\w*)error\b(?::|$)",
        r"shapes cannot be multiplied",
        r"error\(s\) in loading state_dict",
        r"size mismatch for ",
        r"the size of tensor a \(\d+\) must match",
        r"shape '.*' is invalid for input",
        r"stack expects each tensor to be equal size",
        r"expected all tensors to be on the same",
        r"expected (?:scalar type|.*dtype)",
        r"trying to backward through the graph a second time",
        r"expected to have finished reduction in the prior iteration",
        r"element \d+ of tensors does not require grad",
        r"a view of a leaf variable that requires grad",
        r"unrecognized arguments",
        r"modified by an inplace operation",
    ),
    # Peers ------------------------------------------------------------------------------------------------
    _sign(
        Cause.HANG,
        Depth.PEER,
        0.6,
        r"timed out waiting \d+ ?ms for (?:recv|send)",
        r"dataloader timed out",
        r"heartbeat monitor timed out",
        r"timed out after \d+ seconds waiting for clients",
        r"collective operation timeout",
        r"wait timeout after \d+ ?ms",
        r"application timeout caused pair closure",
    ),
    _sign(Cause.NETWORK, Depth.PEER, 0.5, r"client socket has timed out", r"rendezvousconnectionerror"),
    _sign(
        Cause.GLOO, Depth.PEER, 0.4, r"gloo/transport.*(?:connection (?:closed|reset|refused)|read error|write error)"
    ),
    _sign(
        Cause.NCCL,
        Depth.PEER,
        0.5,
        r"nccl error in",
        r"ncclsystemerror",
        r"ncclinternalerror",
        r"ncclunhandled\w+",
        r"nccl communicator was aborted",
    ),
)
