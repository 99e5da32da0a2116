"""All keys of DeepSpeed 0.19.8's JSON and what must become of them, as its users would check: one line each.

A line is ``key = value -> fate``, and the settings that it must make, as keywords of ZeroStrategy. Values are JSON.
"""

KEYS = """
train_batch_size = 32 -> Trainer; train_batch_size=32
train_micro_batch_size_per_gpu = 4 -> Trainer; micro_batch_size=4
gradient_accumulation_steps = 2 -> Trainer; gradient_accumulation_steps=2
managed_gradient_accumulation = false -> no effect
dataloader_drop_last = true -> no effect
optimizer.type = "AdamW" -> honoured; optimizer={"type": "AdamW", "params": {}}
optimizer.params = {"lr": 1} -> refused
optimizer.legacy_fusion = true -> no effect
scheduler.type = "WarmupLR" -> honoured; scheduler={"type": "WarmupLR", "params": {}}
scheduler.params = {"warmup_num_steps": 1} -> refused
zero_allow_untested_optimizer = true -> no effect
zero_force_ds_cpu_optimizer = false -> no effect
gradient_clipping = 0.5 -> Trainer; gradient_clipping=0.5
fp16.enabled = true -> Trainer; precision="16-true"; loss_scale={"loss_scale_window": 1000, "hysteresis": 2}
fp16.loss_scale = 128 -> no effect
fp16.initial_scale_power = 8 -> no effect
fp16.loss_scale_window = 100 -> no effect
fp16.hysteresis = 3 -> no effect
fp16.consecutive_hysteresis = true -> no effect
fp16.min_loss_scale = 2 -> no effect
fp16.auto_cast = true -> no effect
fp16.fp16_master_weights_and_grads = true -> no effect
bf16.enabled = true -> Trainer; precision="bf16-true"; nonfinite_gradients="skip"
bf16.check_grad_overflow = true -> no effect
bf16.immediate_grad_update = true -> no effect
bf16.bf16_master_weights_and_grads = true -> refused
bf16.bf16_optimizer_states = true -> refused
torch_autocast.enabled = true -> Trainer; precision="bf16-mixed"
torch_autocast.dtype = "bfloat16" -> Trainer
torch_autocast.lower_precision_safe_modules = ["torch.nn.LSTM"] -> refused
communication_data_type = "fp32" -> honoured
communication_data_type = "bf16" -> refused
data_types.grad_accum_dtype = "bf16" -> honoured; gradient_dtype="bf16"
data_types.grad_accum_dtype = "fp32" -> honoured
data_types.param_dtype = "bf16" -> refused
data_types.buffer_dtype = "bf16" -> refused
data_types.keep_in_fp32_modules = ["norm"] -> refused
data_types.keep_in_fp32_modules = "auto" -> no effect
amp = {"enabled": true} -> refused
prescale_gradients = true -> no effect
gradient_predivide_factor = 2.0 -> no effect
gradient_allreduce_op = "mean" -> honoured
gradient_allreduce_op = "sum" -> refused
sparse_gradients = true -> refused
disable_allgather = true -> no effect
seq_parallel_communication_data_type = "fp32" -> no effect
activation_checkpointing.cpu_checkpointing = true -> refused
activation_checkpointing.partition_activations = true -> no effect
activation_checkpointing.contiguous_memory_optimization = true -> no effect
activation_checkpointing.number_checkpoints = 4 -> no effect
activation_checkpointing.synchronize_checkpoint_boundary = true -> no effect
activation_checkpointing.profile = true -> no effect
aio.block_size = 8192 -> no effect
aio.queue_depth = 16 -> no effect
aio.intra_op_parallelism = 2 -> no effect
aio.thread_count = 2 -> no effect
aio.single_submit = true -> no effect
aio.overlap_events = false -> no effect
aio.use_gds = true -> refused
checkpoint.tag_validation = "Fail" -> no effect
checkpoint.load_universal = true -> no effect
checkpoint.use_node_local_storage = true -> refused
checkpoint.parallel_write.pipeline_stage = true -> no effect
checkpoint.checkpoint_serialization = false -> no effect
checkpoint.writer.decoupled = true -> refused
checkpoint.writer.type = "FAST" -> no effect
checkpoint.writer.io_buffer_size = 1024 -> no effect
checkpoint.writer.io_buffer_double = true -> no effect
checkpoint.writer.show_statistics = true -> no effect
checkpoint.writer.data_parallel = "replica" -> no effect
checkpoint.writer.io_multiplier = 2 -> no effect
datastates_ckpt = {"host_cache_size": 16} -> no effect
nebula = {"enabled": true} -> refused
comms_logger.enabled = true -> honoured; monitor=true
comms_logger.verbose = true -> no effect
comms_logger.prof_all = true -> no effect
comms_logger.prof_ops = ["all_reduce"] -> no effect
comms_logger.debug = true -> no effect
wall_clock_breakdown = true -> honoured; monitor=true
memory_breakdown = true -> honoured; monitor=true
timers.throughput.enabled = true -> no effect
timers.throughput.synchronized = true -> no effect
flops_profiler.enabled = true -> no effect
flops_profiler.recompute_fwd_factor = 1.0 -> no effect
flops_profiler.profile_step = 1 -> no effect
flops_profiler.module_depth = -1 -> no effect
flops_profiler.top_modules = 1 -> no effect
flops_profiler.detailed = true -> no effect
flops_profiler.output_file = "flops.txt" -> no effect
steps_per_print = 10 -> no effect
dump_state = true -> honoured
disable_python_gc = true -> no effect
log_level = "info" -> no effect
vocabulary_size = 32000 -> no effect
tensorboard.enabled = true -> no effect
tensorboard.output_path = "runs" -> no effect
tensorboard.job_name = "job" -> no effect
wandb.enabled = true -> no effect
wandb.group = "g" -> no effect
wandb.team = "t" -> no effect
wandb.project = "p" -> no effect
csv_monitor.enabled = true -> no effect
csv_monitor.output_path = "runs" -> no effect
csv_monitor.job_name = "job" -> no effect
comet.enabled = true -> no effect
comet.samples_log_interval = 100 -> no effect
comet.project = "p" -> no effect
comet.workspace = "w" -> no effect
comet.api_key = "k" -> no effect
comet.experiment_name = "e" -> no effect
comet.experiment_key = "k" -> no effect
comet.online = true -> no effect
comet.mode = "get" -> no effect
autotuning.enabled = true -> no effect
autotuning.fast = true -> no effect
autotuning.results_dir = "r" -> no effect
autotuning.exps_dir = "e" -> no effect
autotuning.overwrite = true -> no effect
autotuning.start_profile_step = 3 -> no effect
autotuning.end_profile_step = 5 -> no effect
autotuning.metric = "throughput" -> no effect
autotuning.metric_path = "m" -> no effect
autotuning.tuner_type = "gridsearch" -> no effect
autotuning.tuner_early_stopping = 5 -> no effect
autotuning.tuner_num_trials = 50 -> no effect
autotuning.arg_mappings = {} -> no effect
autotuning.max_train_batch_size = 64 -> no effect
autotuning.min_train_batch_size = 1 -> no effect
autotuning.max_train_micro_batch_size_per_gpu = 64 -> no effect
autotuning.min_train_micro_batch_size_per_gpu = 1 -> no effect
autotuning.num_tuning_micro_batch_sizes = 3 -> no effect
autotuning.mp_size = 1 -> no effect
autotuning.model_info = {} -> no effect
compile.deepcompile = true -> no effect
compile.passes = [] -> no effect
compile.double_buffer = true -> no effect
compile.symmetric_memory = true -> no effect
compile.free_activation = true -> no effect
compile.free_activation_threshold = 10 -> no effect
compile.sync_before_reduce = true -> no effect
compile.sync_after_reduce = true -> no effect
compile.sync_before_allgather = true -> no effect
compile.sync_after_allgather = true -> no effect
compile.keep_int_input_tensors = true -> no effect
compile.keep_all_input_tensors = true -> no effect
compile.autoep_non_moe = true -> no effect
compile.offload_activation_pin_memory = true -> no effect
compile.debug_log = true -> no effect
compile.offload_activation = true -> refused
compile.offload_opt_states = true -> refused
compile.offload_parameters = true -> refused
tensor_parallel.autotp_size = 2 -> refused
tensor_parallel.tp.tp_size = 2 -> refused
tensor_parallel.dtype = "bf16" -> no effect
tensor_parallel.preset_model = "llama" -> no effect
tensor_parallel.tp_overlap_comm = true -> no effect
tensor_parallel.partition_config = {} -> no effect
tensor_parallel.vocab_parallel_lm_head = true -> no effect
tensor_parallel.vocab_parallel_ce_backend = "x" -> no effect
tensor_parallel.injection_policy_tuple = [] -> no effect
tensor_parallel.keep_module_on_host = true -> no effect
tensor_parallel.kernel_inject = true -> no effect
tensor_parallel.tp.tp_grain_size = 64 -> no effect
tensor_parallel.tp.mpu = 1 -> no effect
tensor_parallel.tp.tp_group = 1 -> no effect
sequence_parallel_size = 2 -> refused
use_data_before_expert_parallelism = true -> no effect
hybrid_engine = {"enabled": true} -> refused
pipeline = {"stages": 2} -> refused
expert_parallel = {"enabled": true} -> refused
data_efficiency = {"enabled": true} -> refused
weight_quantization = {"quantized_initialization": {"num_bits": 8}} -> refused
msamp = {"enabled": true} -> refused
replace_method = "auto" -> refused
replace_with_kernel_inject = true -> refused
injection_policy = {"layer": "x"} -> refused
curriculum_learning = {"enabled": true} -> refused
progressive_layer_drop = {"enabled": true} -> refused
eigenvalue = {"enabled": true} -> refused
quantize_training = {"enabled": true} -> refused
compression_training = {"weight_quantization": {}} -> refused
sparse_attention = {"mode": "fixed"} -> refused
graph_harvesting = true -> refused
elasticity = {"enabled": true} -> refused
zero_optimization.stage = 2 -> honoured; stage=2
zero_optimization.contiguous_gradients = false -> no effect
zero_optimization.overlap_comm = true -> honoured
zero_optimization.overlap_comm = false -> no effect
zero_optimization.reduce_scatter = false -> no effect
zero_optimization.use_multi_rank_bucket_allreduce = false -> no effect
zero_optimization.allgather_partitions = false -> no effect
zero_optimization.round_robin_gradients = true -> no effect
zero_optimization.parameter_alignment = true -> honoured
zero_optimization.elastic_checkpoint = true -> honoured
zero_optimization.compute_grad_norm = false -> no effect
zero_optimization.load_from_fp32_weights = true -> honoured
zero_optimization.load_from_fp32_weights = false -> refused
zero_optimization.ignore_unused_parameters = true -> honoured
zero_optimization.ignore_unused_parameters = false -> refused
zero_optimization.legacy_stage1 = true -> refused
zero_optimization.grad_hooks = true -> no effect
zero_optimization.memory_efficient_linear = false -> no effect
zero_optimization.pipeline_loading_checkpoint = true -> no effect
zero_optimization.override_module_apply = false -> no effect
zero_optimization.log_trace_cache_warnings = true -> no effect
zero_optimization.enable_sanity_checks = true -> honoured
zero_optimization.save_muon_momentum_buffer_in_memory = true -> no effect
zero_optimization.reduce_bucket_size = 5e6 -> honoured; max_unit_bytes=20000000
zero_optimization.reduce_bucket_size = 5e8 -> honoured; max_unit_bytes=536870912
zero_optimization.reduce_bucket_size = 1000 -> honoured; max_unit_bytes=16777216
zero_optimization.allgather_bucket_size = 5e6 -> honoured; max_unit_bytes=20000000
zero_optimization.sub_group_size = 1000 -> honoured; tile_size=960
zero_optimization.sub_group_size = 1e9 -> honoured; tile_size=262144
zero_optimization.leaf_module.classes = ["mixtral.Moe"] -> honoured; leaf_classes=["Moe"]
zero_optimization.leaf_module.names = ["moe"] -> refused
zero_optimization.leaf_module.name_suffixes = ["moe"] -> refused
zero_optimization.zero_hpz_partition_size = 8 -> refused
zero_optimization.zero_quantized_weights = true -> refused
zero_optimization.zero_quantized_nontrainable_weights = true -> refused
zero_optimization.zero_quantized_gradients = true -> refused
zero_optimization.mics_shard_size = 4 -> refused
zero_optimization.mics_hierarchical_params_gather = true -> refused
zero_optimization.zeropp_loco_param = {"err_beta": 0.8} -> refused
zero_optimization.zenflow = {"topk_ratio": 0.1} -> refused
zero_optimization.offload_optimizer.device = "cpu" -> refused
zero_optimization.offload_optimizer.device = "none" -> honoured
zero_optimization.offload_optimizer.nvme_path = "/scratch" -> no effect
zero_optimization.offload_optimizer.pin_memory = false -> no effect
zero_optimization.offload_optimizer.buffer_count = 5 -> no effect
zero_optimization.offload_optimizer.pipeline_read = true -> no effect
zero_optimization.offload_optimizer.pipeline_write = false -> no effect
zero_optimization.offload_optimizer.fast_init = true -> no effect
zero_optimization.offload_optimizer.ratio = 0.5 -> no effect
zero_optimization.offload_optimizer.super_offload = true -> refused
zero_optimization.offload_optimizer.cpuadam_cores_perc = 0.5 -> no effect
zero_optimization.offload_param.device = "cpu" -> refused
zero_optimization.offload_param.nvme_path = "/scratch" -> no effect
zero_optimization.offload_param.pin_memory = false -> no effect
zero_optimization.offload_param.buffer_count = 5 -> no effect
zero_optimization.offload_param.buffer_size = 1e8 -> no effect
zero_optimization.offload_param.max_in_cpu = 1e9 -> no effect
zero_optimization.cpu_offload = false -> old name
zero_optimization.cpu_offload_param = false -> old name
zero_optimization.cpu_offload_use_pin_memory = true -> old name
"""

AT_STAGE_3 = """
stage3_max_live_parameters = 3e7 -> honoured; max_unit_bytes=40000000
stage3_max_reuse_distance = 1e9 -> no effect
stage3_prefetch_bucket_size = 0 -> honoured; prefetch=0
stage3_prefetch_bucket_size = 5e7 -> honoured
stage3_param_persistence_threshold = 1e5 -> honoured; persistence_threshold=100000
stage3_model_persistence_threshold = 1e6 -> honoured; persistence_limit=1000000
stage3_gather_16bit_weights_on_model_save = true -> honoured; save_16bit_weights=true
stage3_gather_16bit_weights_on_model_save = false -> honoured; save_16bit_weights=false
stage3_gather_fp16_weights_on_model_save = true -> old name; save_16bit_weights=true
stage3_module_granularity_threshold = 100 -> no effect
stage3_use_all_reduce_for_fetch_params = true -> no effect
stage3_allgather_sequential = true -> honoured
max_live_parameters = 3e7 -> old name; max_unit_bytes=40000000
max_reuse_distance = 1e9 -> old name
prefetch_bucket_size = 0 -> old name; prefetch=0
param_persistence_threshold = 1e5 -> old name; persistence_threshold=100000
model_persistence_threshold = 1e6 -> old name; persistence_limit=1000000
gather_16bit_weights_on_model_save = false -> old name; save_16bit_weights=false
module_granularity_threshold = 100 -> old name
use_all_reduce_for_fetch_params = true -> old name
allgather_sequential = false -> old name
offload_optimizer.device = "cpu" -> honoured; offload_optimizer={"device": "cpu"}
offload_param.device = "cpu" -> honoured; offload_params={"device": "cpu"}
cpu_offload = true -> old name; offload_optimizer={"device": "cpu"}
cpu_offload_param = true -> old name; offload_params={"device": "cpu"}
"""

AT_FP16 = """
loss_scale = 128 -> honoured; loss_scale={"loss_scale_window": 1000, "hysteresis": 2, "loss_scale": 128}
initial_scale_power = 8 -> honoured; loss_scale={"loss_scale_window": 1000, "hysteresis": 2, "initial_scale_power": 8}
loss_scale_window = 100 -> honoured; loss_scale={"loss_scale_window": 100, "hysteresis": 2}
hysteresis = 3 -> honoured; loss_scale={"loss_scale_window": 1000, "hysteresis": 3}
min_loss_scale = 2 -> honoured; loss_scale={"loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 2}
auto_cast = true -> honoured
auto_cast = false -> no effect
fp16_master_weights_and_grads = true -> honoured; master_dtype="fp16"; gradient_dtype="fp16"
initial_scale_power = 200 -> refused
min_loss_scale = 0 -> refused
"""

AT_BF16 = """
check_grad_overflow = true -> honoured
check_grad_overflow = false -> honoured; nonfinite_gradients="warn"
immediate_grad_update = true -> no effect
bf16_master_weights_and_grads = true -> refused
bf16_optimizer_states = true -> refused
"""

AT_NVME = """
aio.block_size = 8192 -> honoured; block_size=8192
aio.queue_depth = 16 -> honoured; queue_depth=16
aio.intra_op_parallelism = 2 -> honoured; threads=2
aio.thread_count = 2 -> old name; threads=2
aio.block_size = 1000 -> refused
zero_optimization.offload_optimizer.pin_memory = false -> honoured; pin_memory=false
zero_optimization.offload_optimizer.buffer_count = 5 -> honoured; buffer_count=5
zero_optimization.offload_optimizer.buffer_count = 1 -> honoured; buffer_count=3
zero_optimization.offload_optimizer.pipeline_read = true -> honoured
zero_optimization.offload_optimizer.pipeline_write = false -> no effect
zero_optimization.offload_optimizer.ratio = 0.5 -> honoured; ratio=0.5
zero_optimization.offload_optimizer.ratio = 2 -> refused
zero_optimization.offload_optimizer.nvme_path = "/fast" -> honoured; nvme_path="/fast"
"""
