"""Every key of ``zero_optimization`` in DeepSpeed's JSON (0.19.8), one row each."""

from dataclasses import replace

from lightning_zero.config.deepspeed.row import Fate, Row, flag, names, number, one_of, text, whole

H, A, N, R = Fate.HONOURED, Fate.ALIAS, Fate.NO_EFFECT, Fate.REFUSED

_UNITS = "max_unit_bytes: so many elements in a unit, 16 MiB at least"

_STAGE = [
    Row("stage", H, "", "stage", one_of(0, 1, 2, 3), auto=True),
    Row("contiguous_gradients", N, "gradients always are", convert=flag, met=(True,)),
    Row("overlap_comm", N, "communication always overlaps computation", convert=flag, met=(True,)),
    Row("reduce_scatter", N, "gradients are always reduced into shards", convert=flag, met=(True,)),
    Row("use_multi_rank_bucket_allreduce", N, "gradients are reduced into shards", convert=flag),
    Row("allgather_partitions", N, "shards are always gathered", convert=flag, met=(True,)),
    Row("round_robin_gradients", N, "every unit is cut evenly", convert=flag),
    Row("parameter_alignment", N, "parameters always are aligned", convert=flag, met=(True,)),
    Row("elastic_checkpoint", N, "every checkpoint loads at any number of ranks", convert=flag, met=(True,)),
    Row("compute_grad_norm", N, "a norm is computed where something asks for it", convert=flag, met=(True,)),
    Row("load_from_fp32_weights", R, "masters are always read from the checkpoint", met=(True,), off=(None,)),
    Row("ignore_unused_parameters", R, "parameters without a gradient are always skipped", met=(True,), off=(None,)),
    Row("legacy_stage1", R, "DeepSpeed has removed it"),
    Row("grad_hooks", N, "in DeepSpeed's documentation only", convert=flag),
    Row("memory_efficient_linear", N, "weights are never kept between forward and backward", convert=flag, met=(True,)),
    Row("pipeline_loading_checkpoint", N, "ranks read a checkpoint one after the other", convert=flag),
    Row("override_module_apply", N, "modules on meta are filled unit by unit", convert=flag),
    Row("log_trace_cache_warnings", N, "the order of units is learnt anew where it changes", convert=flag),
    Row("enable_sanity_checks", N, "ranks always check that they agree", convert=flag, met=(True,)),
    Row("save_muon_momentum_buffer_in_memory", N, "there is no Muon here", convert=flag),
]

_SIZES = [
    Row("reduce_bucket_size", H, _UNITS, "elements.reduce_bucket_size", whole(1), auto=True),
    Row("allgather_bucket_size", H, _UNITS, "elements.allgather_bucket_size", whole()),
    Row("stage3_max_live_parameters", H, f"a third of it: {_UNITS}", "elements.stage3_max_live_parameters", whole()),
    Row("stage3_max_reuse_distance", N, "units are freed after every use", convert=whole()),
    Row("stage3_prefetch_bucket_size", H, "0: prefetch=0; else a unit ahead", "prefetch_elements", whole(), auto=True),
    Row("stage3_param_persistence_threshold", H, "", "persistence_threshold", whole(), auto=True),
    Row("stage3_model_persistence_threshold", H, "", "persistence_limit", whole()),
    Row("sub_group_size", H, "tile_size, if it is smaller", "sub_group_size", whole(1)),
]

_STAGE_3 = [
    Row(
        "stage3_gather_16bit_weights_on_model_save",
        H,
        "model.safetensors in checkpoint folders; a checkpoint file has whole weights anyway",
        "save_16bit_weights",
        flag,
    ),
    Row(
        "stage3_gather_fp16_weights_on_model_save",
        A,
        "stage3_gather_16bit_weights_on_model_save",
        "save_16bit_weights",
        flag,
    ),
    Row("stage3_module_granularity_threshold", N, "small neighbours always are one unit", convert=whole()),
    Row("stage3_use_all_reduce_for_fetch_params", N, "the same result", convert=flag),
    Row(
        "stage3_allgather_sequential",
        N,
        "shards are gathered without a bucket",
        convert=flag,
        met=(True,),
    ),
    Row("leaf_module.classes", H, "", "leaf_classes", names),
    Row("leaf_module.names", R, "name the class in leaf_module.classes", off=(None, [])),
    Row("leaf_module.name_suffixes", R, "name the class in leaf_module.classes", off=(None, [])),
    Row("zero_hpz_partition_size", R, "parameters are sharded over all ranks", off=(None, 0, 1)),
    Row("zero_quantized_weights", R, "weights travel unquantised: remove it"),
    Row("zero_quantized_nontrainable_weights", R, "weights travel unquantised: remove it"),
    Row("zero_quantized_gradients", R, "gradients travel unquantised: remove it"),
    Row("mics_shard_size", R, "DeepSpeed has removed it; parameters are sharded over all ranks", off=(None, -1, 0)),
    Row("mics_hierarchical_params_gather", R, "DeepSpeed has removed it"),
    Row("zeropp_loco_param", R, "DeepSpeed has removed it", opaque=True),
    Row("zenflow", R, "it steps with old gradients, which changes the numbers", opaque=True),
]

_SHORT = [
    replace(row, key=row.key.removeprefix("stage3_"), fate=A, words=f"{row.key}: {row.words}")
    for row in (*_SIZES, *_STAGE_3)
    if row.key.startswith("stage3_") and "fp16" not in row.key
]
"""DeepSpeed takes these names, too."""

_DEVICES = one_of("none", "cpu", "nvme", None)

_OFFLOAD = [
    Row("offload_optimizer.device", H, "", "offload_optimizer.device", _DEVICES, auto=True),
    Row("offload_optimizer.nvme_path", H, "", "offload_optimizer.nvme_path", text, auto=True),
    Row("offload_optimizer.pin_memory", H, "", "offload_optimizer.pin_memory", flag),
    Row("offload_optimizer.buffer_count", H, "3 at least", "offload_optimizer.buffer_count", whole()),
    Row("offload_optimizer.pipeline_read", N, "reads always overlap", convert=flag, met=(True,)),
    Row("offload_optimizer.pipeline_write", N, "writes always overlap", convert=flag, met=(True,)),
    Row("offload_optimizer.fast_init", N, "state is made where it rests", convert=flag),
    Row("offload_optimizer.ratio", H, "", "offload_optimizer.ratio", number),
    Row("offload_optimizer.super_offload", R, "it is DeepSpeed's for one kind of machine"),
    Row("offload_optimizer.cpuadam_cores_perc", N, "of super_offload", convert=number),
    Row("offload_param.device", H, "", "offload_params.device", _DEVICES, auto=True),
    Row("offload_param.nvme_path", H, "", "offload_params.nvme_path", text, auto=True),
    Row("offload_param.pin_memory", H, "", "offload_params.pin_memory", flag),
    Row("offload_param.buffer_count", N, "what is read ahead is bounded by prefetch", convert=whole()),
    Row("offload_param.buffer_size", N, "a unit is read as a whole", convert=whole()),
    Row("offload_param.max_in_cpu", N, "parameters rest on the disk alone", convert=whole()),
    Row("cpu_offload", A, "offload_optimizer.device: cpu", convert=flag),
    Row("cpu_offload_param", A, "offload_param.device: cpu", convert=flag),
    Row("cpu_offload_use_pin_memory", A, "pin_memory of both", convert=flag),
]

ZERO_ROWS = [*_STAGE, *_SIZES, *_STAGE_3, *_SHORT, *_OFFLOAD]
