from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RequestSummary(_message.Message):
    __slots__ = ("request_id", "state", "offloaded", "priority", "prompt_tokens", "computed_tokens", "completion_tokens", "max_tokens", "preemptions", "age_seconds", "index")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    OFFLOADED_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    state: str
    offloaded: bool
    priority: int
    prompt_tokens: int
    computed_tokens: int
    completion_tokens: int
    max_tokens: int
    preemptions: int
    age_seconds: float
    index: int
    def __init__(self, request_id: _Optional[str] = ..., state: _Optional[str] = ..., offloaded: _Optional[bool] = ..., priority: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., age_seconds: _Optional[float] = ..., index: _Optional[int] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("state", "limit")
    STATE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    state: str
    limit: int
    def __init__(self, state: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests", "total")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestSummary]
    total: int
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestSummary, _Mapping]]] = ..., total: _Optional[int] = ...) -> None: ...

class GetRequestRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class BlockTable(_message.Message):
    __slots__ = ("group", "first_position", "blocks")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    group: str
    first_position: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[str] = ..., first_position: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class GetRequestResponse(_message.Message):
    __slots__ = ("summary", "row", "plans_in_flight", "token_ids", "block_tables")
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    PLANS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLES_FIELD_NUMBER: _ClassVar[int]
    summary: RequestSummary
    row: int
    plans_in_flight: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    block_tables: _containers.RepeatedCompositeFieldContainer[BlockTable]
    def __init__(self, summary: _Optional[_Union[RequestSummary, _Mapping]] = ..., row: _Optional[int] = ..., plans_in_flight: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., block_tables: _Optional[_Iterable[_Union[BlockTable, _Mapping]]] = ...) -> None: ...

class GetCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CacheGroup(_message.Message):
    __slots__ = ("group", "num_layers", "sliding_window", "blocks_total", "blocks_free", "blocks_cached", "blocks_owned")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    SLIDING_WINDOW_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_OWNED_FIELD_NUMBER: _ClassVar[int]
    group: str
    num_layers: int
    sliding_window: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_owned: int
    def __init__(self, group: _Optional[str] = ..., num_layers: _Optional[int] = ..., sliding_window: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_free: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., blocks_owned: _Optional[int] = ...) -> None: ...

class GetCacheResponse(_message.Message):
    __slots__ = ("page_size", "chunks_total", "chunks_free", "chunk_bytes", "groups", "tokens_stored", "utilisation", "prefix_queries", "prefix_hits", "swap_chunks_total", "swap_chunks_free", "offloads", "restores", "soft_resets", "drafted_tokens", "accepted_tokens")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FREE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_STORED_FIELD_NUMBER: _ClassVar[int]
    UTILISATION_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    SWAP_CHUNKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    SWAP_CHUNKS_FREE_FIELD_NUMBER: _ClassVar[int]
    OFFLOADS_FIELD_NUMBER: _ClassVar[int]
    RESTORES_FIELD_NUMBER: _ClassVar[int]
    SOFT_RESETS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    chunks_total: int
    chunks_free: int
    chunk_bytes: int
    groups: _containers.RepeatedCompositeFieldContainer[CacheGroup]
    tokens_stored: int
    utilisation: float
    prefix_queries: int
    prefix_hits: int
    swap_chunks_total: int
    swap_chunks_free: int
    offloads: int
    restores: int
    soft_resets: int
    drafted_tokens: int
    accepted_tokens: int
    def __init__(self, page_size: _Optional[int] = ..., chunks_total: _Optional[int] = ..., chunks_free: _Optional[int] = ..., chunk_bytes: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[CacheGroup, _Mapping]]] = ..., tokens_stored: _Optional[int] = ..., utilisation: _Optional[float] = ..., prefix_queries: _Optional[int] = ..., prefix_hits: _Optional[int] = ..., swap_chunks_total: _Optional[int] = ..., swap_chunks_free: _Optional[int] = ..., offloads: _Optional[int] = ..., restores: _Optional[int] = ..., soft_resets: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class WatchStepsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StepSummary(_message.Message):
    __slots__ = ("step_id", "num_requests", "num_tokens", "num_prefilling", "num_decoding", "num_pending", "chunks_free", "seconds", "start_seconds", "device_seconds", "num_finished", "num_running", "chunks_total", "utilisation", "preemptions", "missed", "num_drafted")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILLING_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODING_FIELD_NUMBER: _ClassVar[int]
    NUM_PENDING_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FREE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    START_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    UTILISATION_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    num_requests: int
    num_tokens: int
    num_prefilling: int
    num_decoding: int
    num_pending: int
    chunks_free: int
    seconds: float
    start_seconds: float
    device_seconds: float
    num_finished: int
    num_running: int
    chunks_total: int
    utilisation: float
    preemptions: int
    missed: int
    num_drafted: int
    def __init__(self, step_id: _Optional[int] = ..., num_requests: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_prefilling: _Optional[int] = ..., num_decoding: _Optional[int] = ..., num_pending: _Optional[int] = ..., chunks_free: _Optional[int] = ..., seconds: _Optional[float] = ..., start_seconds: _Optional[float] = ..., device_seconds: _Optional[float] = ..., num_finished: _Optional[int] = ..., num_running: _Optional[int] = ..., chunks_total: _Optional[int] = ..., utilisation: _Optional[float] = ..., preemptions: _Optional[int] = ..., missed: _Optional[int] = ..., num_drafted: _Optional[int] = ...) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("blocks_flushed",)
    BLOCKS_FLUSHED_FIELD_NUMBER: _ClassVar[int]
    blocks_flushed: int
    def __init__(self, blocks_flushed: _Optional[int] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace_seconds",)
    GRACE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    grace_seconds: float
    def __init__(self, grace_seconds: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StartProfileRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StartProfileResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopProfileRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopProfileResponse(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class SetLogLevelRequest(_message.Message):
    __slots__ = ("level",)
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    level: str
    def __init__(self, level: _Optional[str] = ...) -> None: ...

class SetLogLevelResponse(_message.Message):
    __slots__ = ("previous",)
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    previous: str
    def __init__(self, previous: _Optional[str] = ...) -> None: ...
