"""Other libraries' words for what foreprop has under another name, or does not need.

They are looked up only when a name or value is wrong, so that the error can say what to write.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from foreprop.errors import INSTALL_LAB

_UNUSED = "leave it out: parameters without a gradient need no option"
_NO_BUCKETS = "there are no buckets; leave it out: the size of slices, slice_elems, suits the links"
_DEVICES = "move the model to its device before parallelize(), and leave it out"
_RENDEZVOUS = "leave it out: ranks and addresses come from torchrun, or from `foreprop run`"
_HALF_PRECISION = (
    "use torch.autocast in the loop, as without foreprop; wire_dtype='bfloat16' sends half the"
    " bytes"
)
_WHOLE = "each rank has the whole model here, as with DDP; there are no shards of parameters"
_SERVERS_STATE = (
    "update='servers' divides the optimizer's state over the servers; parameters stay whole"
)
_FROZEN = "leave it out: parameters with requires_grad=False, or in no optimizer, are left alone"
_ACCUMULATE = (
    "run several backward passes before optimizer.step(), and divide the loss; backward_passes"
    " says how many, if they must be known before the first step"
)
_CLIP = "call torch.nn.utils.clip_grad_norm_ in the loop, or write clip_grad_norm"
_BUFFERS = "leave it out: rank 0's parameters and buffers become everybody's"
_BUFFERS_LATER = "leave it out; docs/semantics.md#buffers says when ranks have rank 0's"
_SUM_OR_MEAN = "write reduction='mean' or reduction='sum'"
_SPARSE = "dense_parameters names embeddings that are not to be held row by row"
_LOADER = "give the loader to foreprop.shard(loader, ...), and leave it out here"
_COMPILED = "call torch.compile(model) before or after parallelize(), and leave it out here"
_HOOK = "there are no hooks on communication; wire_dtype and compression send fewer bytes"
_NO_PLUGIN = "foreprop takes the place of that: leave it out"
_LOGS = "log_steps, trace and watch are for what a session does; the rest is the loop's"
_ORDER = "leave it out: what the next forward pass needs first is sent first"
_OTHER_GROUP = "foreprop has its own connections, and uses no process group: leave it out"

_ONE_BIT = f"write '1bit', a codec of foreprop-lab ({INSTALL_LAB})"

_OWN = "foreprop.parallelize"
# what to do instead, by library and word; where several libraries have a word the first counts
_NAMES: Mapping[str, Mapping[str, str]] = {
    "DistributedDataParallel": {
        "find_unused_parameters": _UNUSED,
        "skip_all_reduce_unused_params": _UNUSED,
        "static_graph": "leave it out: the graph may be another one in each step",
        "bucket_cap_mb": _NO_BUCKETS,
        "bucket_cap_mb_list": _NO_BUCKETS,
        "bucket_size": _NO_BUCKETS,
        "gradient_as_bucket_view": _NO_BUCKETS,
        "batched_grad_copy": _NO_BUCKETS,
        "device_ids": _DEVICES,
        "output_device": _DEVICES,
        "dim": _DEVICES,
        "process_group": _OTHER_GROUP,
        "device_mesh": _OTHER_GROUP,
        "check_reduction": "leave it out: every step is checked",
        "broadcast_buffers": _BUFFERS_LATER,
        "forward_sync_buffers": _BUFFERS_LATER,
        "init_sync": _BUFFERS,
        "delay_all_reduce_named_params": _ORDER,
        "param_to_hook_all_reduce": _ORDER,
        "comm_hook": _HOOK,
        "comm_wrapper": _HOOK,
        "comm_state": _HOOK,
        "comm_state_option": _HOOK,
        "no_sync": _ACCUMULATE,
        "divide_by_initial_world_size": _SUM_OR_MEAN,
        "module": "the first argument of parallelize() is the model",
        "mixed_precision": _HALF_PRECISION,
    },
    "FullyShardedDataParallel": {
        "sharding_strategy": _WHOLE,
        "auto_wrap_policy": "nothing is wrapped, and each rank has the whole model: leave it out",
        "cpu_offload": _SERVERS_STATE,
        "backward_prefetch": _ORDER,
        "forward_prefetch": _ORDER,
        "limit_all_gathers": "push_window_bytes bounds what is under way; leave this out",
        "ignored_modules": _FROZEN,
        "ignored_parameters": _FROZEN,
        "ignored_states": _FROZEN,
        "param_init_fn": "give the model its memory and values before parallelize()",
        "device_id": _DEVICES,
        "sync_module_states": _BUFFERS,
        "use_orig_params": "leave it out: parameters keep their identity and names",
    },
    "fully_shard": {
        "mesh": _OTHER_GROUP,
        "dp_mesh_dims": _OTHER_GROUP,
        "reshard_after_forward": _WHOLE,
        "shard_placement_fn": _WHOLE,
        "mp_policy": _HALF_PRECISION,
        "offload_policy": _SERVERS_STATE,
        "ignored_params": _FROZEN,
    },
    "Horovod": {
        "named_parameters": "leave it out: names are the model's",
        "backward_passes_per_step": "write backward_passes",
        "op": _SUM_OR_MEAN,
        "average": _SUM_OR_MEAN,
        "gradient_predivide_factor": _SUM_OR_MEAN,
        "average_aggregated_gradients": _ACCUMULATE,
        "num_groups": _NO_BUCKETS,
        "groups": _NO_BUCKETS,
        "fusion_threshold": _NO_BUCKETS,
        "fusion_threshold_mb": _NO_BUCKETS,
        "sparse_as_dense": _SPARSE,
        "process_set": _OTHER_GROUP,
        "root_rank": _BUFFERS,
        "device_dense": _DEVICES,
        "device_sparse": _DEVICES,
        "use_gpu": _DEVICES,
        "scale_local_gradients": _SUM_OR_MEAN,
        "min_np": "write elastic=True, and `foreprop run --elastic --nodes MIN:MAX`",
        "max_np": "write max_workers, with elastic=True",
    },
    "accelerate": {
        "gradient_accumulation_steps": _ACCUMULATE,
        "gradient_accumulation_plugin": _ACCUMULATE,
        "device_placement": _DEVICES,
        "cpu": _DEVICES,
        "split_batches": _LOADER,
        "even_batches": _LOADER,
        "dispatch_batches": _LOADER,
        "use_seedable_sampler": _LOADER,
        "dataloader_config": _LOADER,
        "data_seed": _LOADER,
        "non_blocking": _DEVICES,
        "deepspeed_plugin": _NO_PLUGIN,
        "deepspeed_plugins": _NO_PLUGIN,
        "fsdp_plugin": _NO_PLUGIN,
        "ddp_plugin": _NO_PLUGIN,
        "megatron_lm_plugin": _NO_PLUGIN,
        "torch_tp_plugin": _NO_PLUGIN,
        "parallelism_config": _NO_PLUGIN,
        "kwargs_handlers": _NO_PLUGIN,
        "dynamo_backend": _COMPILED,
        "dynamo_plugin": _COMPILED,
        "rng_types": _LOADER,
        "log_with": _LOGS,
        "project_dir": _LOGS,
        "project_config": _LOGS,
        "step_scheduler_with_optimizer": "leave it out: schedulers step as they do without",
    },
    "a trainer": {
        "accumulate_grad_batches": _ACCUMULATE,
        "gradient_accumulation": _ACCUMULATE,
        "accumulation_steps": _ACCUMULATE,
        "gradient_clip_val": _CLIP,
        "gradient_clipping": _CLIP,
        "max_grad_norm": _CLIP,
        "max_norm": _CLIP,
        "clip_grad": _CLIP,
        "precision": _HALF_PRECISION,
        "amp": _HALF_PRECISION,
        "fp16": _HALF_PRECISION,
        "bf16": _HALF_PRECISION,
        "use_amp": _HALF_PRECISION,
        "dtype": _HALF_PRECISION,
        "grad_scaler": "write scaler=, an argument of parallelize()",
        "strategy": "write architecture= or preset=",
        "compile": _COMPILED,
        "zero_stage": _SERVERS_STATE,
        "batch_size": _LOADER,
        "num_workers": _LOADER,
        "shuffle": _LOADER,
        "seed": _LOADER,
        "drop_last": _LOADER,
    },
    "DeepSpeed": {
        "train_batch_size": _LOADER,
        "train_micro_batch_size_per_gpu": _LOADER,
        "zero_optimization": _SERVERS_STATE,
        "allreduce_bucket_size": _NO_BUCKETS,
        "reduce_bucket_size": _NO_BUCKETS,
        "overlap_comm": _ORDER,
        "communication_data_type": "write wire_dtype='bfloat16' or 'float16'",
        "fp32_allreduce": "float32 is summed in float32, and half precision, too: leave it out",
    },
    "transformers": {
        "ddp_find_unused_parameters": _UNUSED,
        "ddp_bucket_cap_mb": _NO_BUCKETS,
        "ddp_broadcast_buffers": _BUFFERS_LATER,
        "ddp_backend": "write collectives='gloo' or 'nccl', with architecture='ring'",
        "ddp_timeout": "write step_timeout_s and join_timeout_s, in seconds",
        "per_device_train_batch_size": _LOADER,
        "dataloader_drop_last": _LOADER,
    },
    "torch.distributed": {
        "backend": "write collectives='gloo' or 'nccl', with architecture='ring'",
        "init_method": _RENDEZVOUS,
        "rank": _RENDEZVOUS,
        "local_rank": _RENDEZVOUS,
        "world_size": _RENDEZVOUS,
        "num_nodes": _RENDEZVOUS,
        "nnodes": _RENDEZVOUS,
        "nproc_per_node": _RENDEZVOUS,
        "master_addr": _RENDEZVOUS,
        "master_port": _RENDEZVOUS,
        "store": _RENDEZVOUS,
        "timeout": "write step_timeout_s and join_timeout_s, in seconds",
        "port": "write port_range, as '29600-29699'",
    },
    _OWN: {
        "preset": "an argument of parallelize() and Config.resolve(); a Config has its settings",
        "scaler": "an argument of parallelize(), beside config",
        "resume": "an argument of parallelize(), beside config",
        "world": "an argument of parallelize(), beside config",
        "optimizer": "an argument of parallelize(), beside config",
        "model": "an argument of parallelize(), beside config",
        "config": "an argument of parallelize()",
    },
}

_RING = "for all-reduce write 'ring'"
_SERVERS = (
    "for servers beside the workers write 'p2p', for others 'ps' with dedicated_servers=NUMBER"
)
_AUTOMATIC = "to have it chosen write 'auto'"
_FLOAT16, _BFLOAT16 = "write 'float16'", "write 'bfloat16'"
_ARCHITECTURES = {
    "allreduce": _RING,
    "all_reduce": _RING,
    "ring_allreduce": _RING,
    "ring_all_reduce": _RING,
    "ringallreduce": _RING,
    "collective": _RING,
    "collectives": _RING,
    "ddp": _RING,
    "horovod": _RING,
    "gloo": "write architecture='ring', collectives='gloo'",
    "nccl": "write architecture='ring', collectives='nccl'",
    "mpi": _RING,
    "parameter_server": _SERVERS,
    "parameter_servers": _SERVERS,
    "parameterserver": _SERVERS,
    "param_server": _SERVERS,
    "server": _SERVERS,
    "servers": _SERVERS,
    "kvstore": "that is a preset: write preset='kvstore'",
    "p3": "that is a preset, the default: leave architecture out",
    "peer_to_peer": "write 'p2p'",
    "peer2peer": "write 'p2p'",
    "dedicated": "write 'ps', with dedicated_servers=NUMBER",
    "parallax": "write 'hybrid'",
    "automatic": _AUTOMATIC,
    "fsdp": "each rank has the whole model here: 'ring' is nearest to it",
}
# what to write, by setting and value, in small letters and without ``torch.``
_VALUES: Mapping[str, Mapping[str, str]] = {
    "architecture": _ARCHITECTURES,
    "wire_dtype": {
        "fp16": _FLOAT16,
        "f16": _FLOAT16,
        "half": _FLOAT16,
        "float_16": _FLOAT16,
        "float16": _FLOAT16,  # torch's
        "16": "write 'bfloat16' or 'float16'",
        "bf16": _BFLOAT16,
        "bfloat": _BFLOAT16,
        "bfloat_16": _BFLOAT16,
        "bfloat16": _BFLOAT16,
        "float32": "float32 is sent as it is: leave wire_dtype out",
        "fp32": "float32 is sent as it is: leave wire_dtype out",
        "float": "float32 is sent as it is: leave wire_dtype out",
        "int8": "write compression='int8', and leave wire_dtype out",
        "fp8": "the least is compression='int8' or 'int4': leave wire_dtype out",
    },
    "compression": {
        "float16": "write 'fp16', or wire_dtype='float16'",
        "half": "write 'fp16', or wire_dtype='float16'",
        "fp16compressor": "write 'fp16', or wire_dtype='float16'",
        "bfloat16": "write 'bf16', or wire_dtype='bfloat16'",
        "bf16compressor": "write 'bf16', or wire_dtype='bfloat16'",
        "nonecompressor": "leave compression out",
        "fp16_compress_hook": "write 'fp16', or wire_dtype='float16'",
        "bf16_compress_hook": "write 'bf16', or wire_dtype='bfloat16'",
        "top_k": "write 'topk:0.01'",
        "random_k": "write 'randomk:0.01'",
        "onebit": _ONE_BIT,
        "one_bit": _ONE_BIT,
        "powersgd": "there is none of low rank; 'auto' chooses as few bytes as are needed",
        "power_sgd": "there is none of low rank; 'auto' chooses as few bytes as are needed",
        "gzip": "write 'lossless'",
        "zstd": "write 'lossless'",
        "zlib": "write 'lossless'",
        "lz4": "write 'lossless'",
    },
    "preset": {
        word: f"a preset is an order of sending; architecture is a setting: {answer}"
        for word, answer in _ARCHITECTURES.items()
        if word not in ("kvstore", "p3")
    }
    | {word: f"write architecture={word!r}" for word in ("p2p", "ps", "ring", "hybrid", "auto")},
    "collectives": {"mpi": "write 'gloo'", "ucc": "write 'gloo'"},
    "reduction": {
        "average": "write 'mean'",
        "avg": "write 'mean'",
        "reduceop.avg": "write 'mean'",
        "redoptype.avg": "write 'mean'",
        "reduceop.sum": "write 'sum'",
        "none": "each rank's own gradients are never used; write 'mean' or 'sum'",
    },
    "encryption": {"true": "write 'tls'", "ssl": "write 'tls'", "false": "leave it out"},
    "update": {
        "worker": "write 'workers'",
        "local": "write 'workers'",
        "server": "write 'servers'",
        "remote": "write 'servers'",
    },
}


def advice_on_name(name: str, known: Iterable[object], *, prefix: str = "") -> str:
    """What to add to an error about an unknown setting: a library's word, or a near name."""
    return answer_to_name(name) or did_you_mean(name, known, prefix=prefix)


def advice_on_value(setting: str, value: object, known: Iterable[object]) -> str:
    """What to add to an error about a setting's value: a library's word, or a near one."""
    return answer_to_value(setting, value) or did_you_mean(str(value), known)


def answer_to_name(name: str) -> str:
    """What a library's word for a setting is here; empty if no library has the word."""
    word = _plain(name)
    for library, answers in _NAMES.items():
        if word in answers:
            whose = "" if library == _OWN else f"{library}'s: "
            return f", which is {whose}{answers[word]}"
    return ""


def answer_to_value(setting: str, value: object) -> str:
    """What to write for a library's word for a value; empty if no library has the word."""
    text = getattr(value, "__name__", None) or str(value)
    answer = _VALUES.get(setting, {}).get(_plain(text).removeprefix("torch."))
    return f"; {answer}" if answer else ""


def _plain(word: str) -> str:
    return word.strip().lower().replace("-", "_").replace(" ", "_")


# Near names.
_CLOSE = 0.8  # difflib's measure of how like a known name one must be to be meant for it
_LEAST_PART = 4  # letters that may be a part of a known name
_MOST_NAMES = 5


def did_you_mean(name: str, known: Iterable[object], *, prefix: str = "") -> str:
    """What to add to an error about ``name``: the known name that is close, or a few that may be.

    The user writes each known name behind ``prefix``.
    """
    words = [word for word in known if isinstance(word, str)]
    found = difflib.get_close_matches(name, words, n=1, cutoff=_CLOSE)
    if not found:
        having = [word for word in words if len(name) >= _LEAST_PART and name in word]
        found = [*having, *difflib.get_close_matches(name, words, n=_MOST_NAMES)]
    *others, last = [repr(prefix + word) for word in dict.fromkeys(found[:_MOST_NAMES])] or [""]
    either = f"{', '.join(others)} or " if others else ""
    return f"; did you mean {either}{last}?" if last else ""
