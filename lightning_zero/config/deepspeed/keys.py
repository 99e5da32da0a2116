"""Every key of DeepSpeed's JSON (0.19.8) outside ``zero_optimization``, one row each."""

from lightning_zero.config.deepspeed.row import Fate, Row, block, dtype, flag, number, text, whole

H, T, A, N, R = Fate.HONOURED, Fate.TRAINER, Fate.ALIAS, Fate.NO_EFFECT, Fate.REFUSED

_BATCH = [
    Row("train_batch_size", T, "samples of a step, on all ranks", "train_batch_size", whole(1), auto=True),
    Row("train_micro_batch_size_per_gpu", T, "DataLoader(batch_size=)", "micro_batch_size", whole(1), auto=True),
    Row(
        "gradient_accumulation_steps", T, "accumulate_grad_batches", "gradient_accumulation_steps", whole(1), auto=True
    ),
    Row("managed_gradient_accumulation", N, "Lightning decides when to step", convert=flag),
    Row("dataloader_drop_last", N, "say it to the DataLoader", convert=flag),
]

_OPTIMIZER = [
    Row("optimizer.type", H, "instead of configure_optimizers", convert=text),
    Row("optimizer.params", H, "of the optimizer", convert=block, auto=True, opaque=True),
    Row("optimizer.legacy_fusion", N, "torch chooses the kernel", convert=flag),
    Row("scheduler.type", H, "moves with every optimizer step", convert=text),
    Row("scheduler.params", H, "of the scheduler", convert=block, auto=True, opaque=True),
    Row("zero_allow_untested_optimizer", N, "any element-wise optimizer is allowed, no other one is", convert=flag),
    Row("zero_force_ds_cpu_optimizer", N, "the optimizer that is named makes the step, wherever it is", convert=flag),
    Row("gradient_clipping", T, "gradient_clip_val", "gradient_clipping", number, auto=True),
]

_PRECISION = [
    Row("fp16.enabled", T, "precision: 16-true unless the Trainer says 16-mixed", convert=flag, auto=True),
    Row("fp16.loss_scale", H, "0: dynamic", "loss_scale.loss_scale", number),
    Row("fp16.initial_scale_power", H, "2 to the power of it, 127 at most", "loss_scale.initial_scale_power", whole(0)),
    Row("fp16.loss_scale_window", H, "", "loss_scale.loss_scale_window", whole(1)),
    Row("fp16.hysteresis", H, "", "loss_scale.hysteresis", whole(1)),
    Row("fp16.consecutive_hysteresis", H, "", "loss_scale.consecutive_hysteresis", flag),
    Row("fp16.min_loss_scale", H, "", "loss_scale.min_loss_scale", number),
    Row("fp16.auto_cast", N, "Lightning always casts the batch", convert=flag, met=(True,)),
    Row("fp16.fp16_master_weights_and_grads", H, "master_dtype, gradient_dtype", convert=flag),
    Row("bf16.enabled", T, "precision: bf16-true unless the Trainer says bf16-mixed", convert=flag, auto=True),
    Row("bf16.check_grad_overflow", H, "nonfinite_gradients", convert=flag),
    Row("bf16.immediate_grad_update", N, "gradients are reduced in the backward", convert=flag),
    Row("bf16.bf16_master_weights_and_grads", H, "master_dtype, gradient_dtype", convert=flag),
    Row("bf16.bf16_optimizer_states", H, "states have the dtype of the masters", convert=flag),
    Row("torch_autocast.enabled", T, "precision: bf16-mixed or 16-mixed", convert=flag),
    Row("torch_autocast.dtype", T, "of torch_autocast", convert=dtype),
    Row(
        "torch_autocast.lower_precision_safe_modules",
        R,
        "weights of nn.Linear and nn.ConvNd are gathered in 16 bits, others are not",
        off=(None, ["torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d"]),
    ),
    Row("communication_data_type", H, "see data_types.grad_accum_dtype", convert=dtype),
    Row("data_types.grad_accum_dtype", H, "gradient_dtype", convert=dtype),
    Row("data_types.param_dtype", R, "use precision"),
    Row("data_types.buffer_dtype", R, "buffers have the dtype of the precision"),
    Row(
        "data_types.keep_in_fp32_modules", R, "use precision bf16-mixed, which keeps norms in fp32", off=(None, "auto")
    ),
    Row("amp", R, "DeepSpeed has removed it: use bf16, fp16 or torch_autocast", opaque=True),
]

_GRADIENTS = [
    Row("prescale_gradients", N, "gradients are summed in fp32 and need no scaling before", convert=flag),
    Row("gradient_predivide_factor", N, "gradients are summed in fp32 and need no scaling before", convert=number),
    Row("gradient_allreduce_op", R, "gradients are averaged over the ranks: multiply the loss", met=("mean",)),
    Row("sparse_gradients", R, "DeepSpeed has removed it; sparse gradients are reduced as dense ones"),
    Row("disable_allgather", N, "DeepSpeed does not use it", convert=flag),
    Row("seq_parallel_communication_data_type", N, "there is no sequence parallelism here"),
]

_ACTIVATIONS = [
    Row("activation_checkpointing.cpu_checkpointing", R, "use torch.autograd.graph.save_on_cpu in the module"),
    Row("activation_checkpointing.partition_activations", N, "only with model parallelism", convert=flag),
    Row("activation_checkpointing.contiguous_memory_optimization", N, "only with model parallelism", convert=flag),
    Row("activation_checkpointing.number_checkpoints", N, "only with model parallelism"),
    Row("activation_checkpointing.synchronize_checkpoint_boundary", N, "only for timing", convert=flag),
    Row("activation_checkpointing.profile", N, "use the Trainer's profiler", convert=flag),
]

_AIO = [
    Row("aio.block_size", H, "", "aio.block_size", whole(1)),
    Row("aio.queue_depth", H, "", "aio.queue_depth", whole(1)),
    Row("aio.intra_op_parallelism", H, "", "aio.threads", whole(1)),
    Row("aio.thread_count", A, "intra_op_parallelism, its name since 2025", "aio.threads", whole(1)),
    Row("aio.single_submit", N, "requests go to threads", convert=flag),
    Row("aio.overlap_events", N, "requests always overlap", convert=flag),
    Row("aio.use_gds", R, "GPUDirect Storage is not supported"),
]

_CHECKPOINTS = [
    Row("checkpoint.tag_validation", N, "Lightning names the files", convert=text),
    Row("checkpoint.load_universal", N, "every checkpoint of ours loads at any number of ranks", convert=flag),
    Row("checkpoint.use_node_local_storage", R, "a checkpoint lies where all hosts reach it"),
    Row("checkpoint.parallel_write.pipeline_stage", N, "ranks always write their parts side by side", convert=flag),
    Row("checkpoint.checkpoint_serialization", N, "the format is torch's", convert=flag),
    Row("checkpoint.writer.decoupled", R, "use state_dict_type='sharded' with async_save=True"),
    *(
        Row(f"checkpoint.writer.{name}", N, "of DeepSpeed's own writer")
        for name in "type io_buffer_size io_buffer_double show_statistics data_parallel io_multiplier".split()
    ),
    Row("datastates_ckpt", N, "use state_dict_type='sharded' with async_save=True", opaque=True),
    Row("nebula", R, "DeepSpeed has removed it: use Lightning's ModelCheckpoint", opaque=True),
]

_SEEING = [
    Row("comms_logger.enabled", H, "ZeroMonitor, to the Trainer's loggers", convert=flag),
    *(
        Row(f"comms_logger.{name}", N, "ZeroMonitor counts all communication by its kind")
        for name in "verbose prof_all prof_ops debug".split()
    ),
    Row("wall_clock_breakdown", H, "ZeroMonitor, to the Trainer's loggers", convert=flag),
    Row("memory_breakdown", H, "ZeroMonitor, to the Trainer's loggers", convert=flag),
    *(
        Row(f"timers.throughput.{name}", N, "use Lightning's ThroughputMonitor", convert=flag)
        for name in "enabled synchronized".split()
    ),
    *(
        Row(f"flops_profiler.{name}", N, "use Lightning's ThroughputMonitor or torch's profiler")
        for name in ("enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file").split()
    ),
    Row("steps_per_print", N, "Lightning has a progress bar"),
    Row("dump_state", N, "what is set is always printed, and strategy.resolved() has it", convert=flag, met=(True,)),
    Row("disable_python_gc", N, "use Lightning's GarbageCollection callback", convert=flag),
    Row("log_level", N, "Python's logging has levels: logging.getLogger('lightning.pytorch')"),
    Row("vocabulary_size", N, "DeepSpeed only warns of it"),
    *(
        Row(f"{block_name}.{name}", N, "use Trainer(logger=)")
        for block_name, names in {
            "tensorboard": "enabled output_path job_name",
            "wandb": "enabled group team project",
            "csv_monitor": "enabled output_path job_name",
            "comet": (
                "enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode"
            ),
        }.items()
        for name in names.split()
    ),
]

_OTHERS = [
    *(
        Row(f"autotuning.{name}", N, "trains untuned")
        for name in (
            "enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step metric metric_path "
            "tuner_type tuner_early_stopping tuner_num_trials arg_mappings max_train_batch_size min_train_batch_size "
            "max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes "
            "mp_size model_info"
        ).split()
    ),
    Row("compile.offload_activation", R, "use torch.autograd.graph.save_on_cpu in the module"),
    Row("compile.offload_opt_states", R, "use zero_optimization.offload_optimizer"),
    Row("compile.offload_parameters", R, "use zero_optimization.offload_param"),
    *(
        Row(f"compile.{name}", N, "of DeepCompile; torch.compile works on the module")
        for name in (
            "deepcompile passes double_buffer symmetric_memory free_activation free_activation_threshold "
            "sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors "
            "keep_all_input_tensors autoep_non_moe offload_activation_pin_memory debug_log"
        ).split()
    ),
    Row("tensor_parallel.autotp_size", R, "there is no tensor parallelism here", off=(None, 0, 1)),
    Row("tensor_parallel.tp.tp_size", R, "there is no tensor parallelism here", off=(None, 0, 1)),
    *(
        Row(f"tensor_parallel.{name}", N, "of tensor parallelism, which is off", opaque=True)
        for name in (
            "dtype preset_model tp_overlap_comm partition_config vocab_parallel_lm_head vocab_parallel_ce_backend "
            "injection_policy_tuple keep_module_on_host kernel_inject tp.tp_grain_size tp.mpu tp.tp_group"
        ).split()
    ),
    Row("sequence_parallel_size", R, "there is no sequence parallelism here", off=(None, 0, 1)),
    Row("use_data_before_expert_parallelism", N, "there is no expert parallelism here"),
    *(
        Row(name, R, f"{what} is not supported", opaque=True)
        for name, what in {
            "hybrid_engine": "generation inside of training by DeepSpeed's kernels",
            "pipeline": "pipeline parallelism",
            "expert_parallel": "expert parallelism (experts are trained as any module: leaf_module)",
            "data_efficiency": "DeepSpeed's data pipeline",
            "weight_quantization": "inference with quantised weights",
            "msamp": "MS-AMP",
            "replace_method": "DeepSpeed's inference",
            "replace_with_kernel_inject": "DeepSpeed's inference",
            "injection_policy": "DeepSpeed's inference",
        }.items()
    ),
    *(
        Row(name, R, "DeepSpeed has removed it, and without it training differs", opaque=True)
        for name in (
            "curriculum_learning progressive_layer_drop eigenvalue quantize_training compression_training "
            "sparse_attention graph_harvesting elasticity"
        ).split()
    ),
]

ROOT_ROWS = [
    *_BATCH,
    *_OPTIMIZER,
    *_PRECISION,
    *_GRADIENTS,
    *_ACTIVATIONS,
    *_AIO,
    *_CHECKPOINTS,
    *_SEEING,
    *_OTHERS,
]
