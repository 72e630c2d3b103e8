from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Envelope(_message.Message):
    __slots__ = ("scheduler_boot_id", "worker_boot_id", "hello", "configure", "ready", "step_plan", "step_result", "mask", "heartbeat", "fault", "resume", "bye")
    SCHEDULER_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CONFIGURE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    STEP_PLAN_FIELD_NUMBER: _ClassVar[int]
    STEP_RESULT_FIELD_NUMBER: _ClassVar[int]
    MASK_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    scheduler_boot_id: int
    worker_boot_id: int
    hello: Hello
    configure: Configure
    ready: Ready
    step_plan: StepPlan
    step_result: StepResult
    mask: Mask
    heartbeat: Heartbeat
    fault: Fault
    resume: Resume
    bye: Bye
    def __init__(self, scheduler_boot_id: _Optional[int] = ..., worker_boot_id: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., configure: _Optional[_Union[Configure, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., step_plan: _Optional[_Union[StepPlan, _Mapping]] = ..., step_result: _Optional[_Union[StepResult, _Mapping]] = ..., mask: _Optional[_Union[Mask, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., fault: _Optional[_Union[Fault, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., bye: _Optional[_Union[Bye, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "version", "host", "pid", "is_standby")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    IS_STANDBY_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    version: str
    host: str
    pid: int
    is_standby: bool
    def __init__(self, protocol: _Optional[int] = ..., version: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., is_standby: _Optional[bool] = ...) -> None: ...

class Configure(_message.Message):
    __slots__ = ("model", "device", "dtype", "page_size", "num_blocks", "max_memory_percent", "max_batch_tokens", "max_requests_per_batch", "max_model_len", "deterministic", "use_cuda_graph", "q_padding_interval_size", "cpu_offload_space", "weight_format", "attention", "num_threads", "kv_cache_dtype", "step_timeout")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_MEMORY_PERCENT_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_PER_BATCH_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    USE_CUDA_GRAPH_FIELD_NUMBER: _ClassVar[int]
    Q_PADDING_INTERVAL_SIZE_FIELD_NUMBER: _ClassVar[int]
    CPU_OFFLOAD_SPACE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    model: str
    device: str
    dtype: str
    page_size: int
    num_blocks: int
    max_memory_percent: float
    max_batch_tokens: int
    max_requests_per_batch: int
    max_model_len: int
    deterministic: bool
    use_cuda_graph: bool
    q_padding_interval_size: int
    cpu_offload_space: float
    weight_format: str
    attention: str
    num_threads: int
    kv_cache_dtype: str
    step_timeout: float
    def __init__(self, model: _Optional[str] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., page_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_memory_percent: _Optional[float] = ..., max_batch_tokens: _Optional[int] = ..., max_requests_per_batch: _Optional[int] = ..., max_model_len: _Optional[int] = ..., deterministic: _Optional[bool] = ..., use_cuda_graph: _Optional[bool] = ..., q_padding_interval_size: _Optional[int] = ..., cpu_offload_space: _Optional[float] = ..., weight_format: _Optional[str] = ..., attention: _Optional[str] = ..., num_threads: _Optional[int] = ..., kv_cache_dtype: _Optional[str] = ..., step_timeout: _Optional[float] = ...) -> None: ...

class CacheGroup(_message.Message):
    __slots__ = ("kind", "layers", "sliding_window", "blocks_per_chunk")
    KIND_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    SLIDING_WINDOW_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PER_CHUNK_FIELD_NUMBER: _ClassVar[int]
    kind: str
    layers: _containers.RepeatedScalarFieldContainer[int]
    sliding_window: int
    blocks_per_chunk: int
    def __init__(self, kind: _Optional[str] = ..., layers: _Optional[_Iterable[int]] = ..., sliding_window: _Optional[int] = ..., blocks_per_chunk: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("model_path", "model_type", "architecture", "vocab_size", "max_model_len", "dtype", "device", "groups", "page_size", "num_chunks", "chunk_bytes", "num_swap_chunks", "graph_sizes", "attention", "overlaps_swap", "kv_cache_dtype", "num_embeddings", "max_logits")
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAP_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    GRAPH_SIZES_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    OVERLAPS_SWAP_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGITS_FIELD_NUMBER: _ClassVar[int]
    model_path: str
    model_type: str
    architecture: str
    vocab_size: int
    max_model_len: int
    dtype: str
    device: str
    groups: _containers.RepeatedCompositeFieldContainer[CacheGroup]
    page_size: int
    num_chunks: int
    chunk_bytes: int
    num_swap_chunks: int
    graph_sizes: _containers.RepeatedScalarFieldContainer[int]
    attention: str
    overlaps_swap: bool
    kv_cache_dtype: str
    num_embeddings: int
    max_logits: int
    def __init__(self, model_path: _Optional[str] = ..., model_type: _Optional[str] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[CacheGroup, _Mapping]]] = ..., page_size: _Optional[int] = ..., num_chunks: _Optional[int] = ..., chunk_bytes: _Optional[int] = ..., num_swap_chunks: _Optional[int] = ..., graph_sizes: _Optional[_Iterable[int]] = ..., attention: _Optional[str] = ..., overlaps_swap: _Optional[bool] = ..., kv_cache_dtype: _Optional[str] = ..., num_embeddings: _Optional[int] = ..., max_logits: _Optional[int] = ...) -> None: ...

class StepPlan(_message.Message):
    __slots__ = ("step_id", "counts", "awaits_mask")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    AWAITS_MASK_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    counts: _containers.RepeatedScalarFieldContainer[int]
    awaits_mask: bool
    def __init__(self, step_id: _Optional[int] = ..., counts: _Optional[_Iterable[int]] = ..., awaits_mask: _Optional[bool] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("step_id", "counts", "device_microseconds", "queue_microseconds")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    counts: _containers.RepeatedScalarFieldContainer[int]
    device_microseconds: int
    queue_microseconds: int
    def __init__(self, step_id: _Optional[int] = ..., counts: _Optional[_Iterable[int]] = ..., device_microseconds: _Optional[int] = ..., queue_microseconds: _Optional[int] = ...) -> None: ...

class Mask(_message.Message):
    __slots__ = ("step_id", "sample_indices", "words")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDICES_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    sample_indices: _containers.RepeatedScalarFieldContainer[int]
    words: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, step_id: _Optional[int] = ..., sample_indices: _Optional[_Iterable[int]] = ..., words: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("last_finished_step", "busy", "busy_step", "progress")
    LAST_FINISHED_STEP_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    BUSY_STEP_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    last_finished_step: int
    busy: str
    busy_step: int
    progress: float
    def __init__(self, last_finished_step: _Optional[int] = ..., busy: _Optional[str] = ..., busy_step: _Optional[int] = ..., progress: _Optional[float] = ...) -> None: ...

class Fault(_message.Message):
    __slots__ = ("step_id", "error", "is_fatal")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    IS_FATAL_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    error: str
    is_fatal: bool
    def __init__(self, step_id: _Optional[int] = ..., error: _Optional[str] = ..., is_fatal: _Optional[bool] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("next_step_id",)
    NEXT_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    next_step_id: int
    def __init__(self, next_step_id: _Optional[int] = ...) -> None: ...

class Bye(_message.Message):
    __slots__ = ("reason", "is_failure")
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_FAILURE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    is_failure: bool
    def __init__(self, reason: _Optional[str] = ..., is_failure: _Optional[bool] = ...) -> None: ...
