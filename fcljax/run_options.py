"""The keyword options of `fcljax.run` and `fcljax.fedavg`, for editors.

Written by experiments/write_types.py. What a method reads, and its defaults: `fcljax run METHOD --help`.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypedDict

from fcljax.types import (
    Attack,
    ClientOptimiser,
    LearningRateSchedule,
    MergingRule,
    OptaxOptimiser,
    ServerOptimiser,
    TaskPool,
)


class MergingOptions(TypedDict, total=False):
    """How the server merges uploads."""

    aggregator: (
        Literal[
            "mean",
            "uniform",
            "median",
            "trimmed_mean",
            "geometric_median",
            "krum",
            "multi_krum",
            "centred_clipping",
        ]
        | MergingRule
    )
    clip_norm: float
    clip_radius: float
    malicious_bound: int
    noise_multiplier: float
    server_adaptivity: float
    server_momentum: float
    server_optimiser: Literal["none", "momentum", "adam", "yogi"] | ServerOptimiser | OptaxOptimiser
    server_step: float
    trim: float


class RunOptions(MergingOptions, total=False):
    """Options of `fcljax run METHOD`, under the names that they have there."""

    adapter: str
    adaptive_start: float
    adversarial_weight: float
    affinity_temperature: float
    align_decay: float
    align_epochs: int
    align_lr: float
    align_samples: int
    alpha: float
    attack: Literal["sign_flip", "scale", "label_flip", "nan", "weight", "counts", "certain", "gram"] | Attack
    attack_factor: float
    augment: bool | None
    base_classes: int
    batch_devices: int
    batch_size: int
    blurry: float
    bound_radius: float
    bound_weight: float
    calibration_epochs: int
    calibration_lr: float
    category_ratio: float
    checkpoint: str | None
    checkpoint_every: int | None
    claimed_weight: float
    class_list: str
    class_order: str | Sequence[Any]
    class_prompts: str
    classes: str | Sequence[Any]
    classes_per_client: int
    classes_per_task: int
    classifier: Literal["linear", "nearest"]
    client_sparsity: float
    clients: int
    coda_blocks: int
    coda_components: int
    coda_gram_schmidt: bool
    coda_length: int
    coda_orthogonality: float
    coda_upload: Literal["current", "all"]
    compensation_epochs: int
    compensation_length: int
    compensation_lr: float
    compensation_share: float
    context_length: int
    contrast_far: float
    contrast_margin: float
    contrast_near: float
    crop_padding: float
    current_weight: float
    data_budget: int | None
    data_dir: str | None
    decoder: str | None
    devices: int
    diagnose: bool
    disjoint: float
    distance: Literal["sqrt_scaled", "squared"]
    distill_lr: float
    distill_phases: Literal["shared", "sequential"]
    distill_steps: int
    distill_temperature: float
    distill_weight: float
    dp_delta: float
    dtype: Literal["auto", "float32", "tf32", "bfloat16"]
    dual_blocks: int
    dual_candidates: Literal["seen", "all"]
    dual_eval_batchwise: bool
    dual_key_weight: float
    dual_length: int
    dual_reshape_bug: bool
    dual_shared_blocks: int
    dual_shared_length: int
    dual_transfer: int
    dual_upload: Literal["current", "all"]
    dummy_clients: int
    dynamic_weight: float
    entropy_rise: float
    entropy_unit: Literal["share", "nats"]
    entropy_weight: float
    epochs: int
    eval_batch_size: int
    eval_every_round: bool
    evaluated: Literal["server", "clients"]
    ewc_weight: float
    exact_task_match: bool
    exemplars: int
    faults: str
    features: Literal["prompted", "both"]
    fidelity: Literal["intended", "paper", "released", "improved"]
    finetune_weight: float
    fisher_gradients: Literal["examples", "batches"]
    fisher_limit: float
    fisher_measured: Literal["task", "round"]
    full_lr: float
    gate_scale: Literal["learnable", "fixed"]
    generator_batch: int
    generator_channels: int
    generator_growth: int
    generator_heads: int
    generator_layers: int
    generator_lr: float
    generator_mse: Literal["sum", "mean", "none"]
    generator_norm: bool
    generator_steps: int
    global_lora: Literal["sum", "first", "products"]
    global_share: float
    glyph_test: int
    glyph_train: int
    gradient_side: int
    hardness: float
    head_gram: float
    heads: int | None
    headtune: bool
    holdout: float
    image_size: int | None
    imbalance: float
    init_std: float
    kb_samples: int
    kb_tasks: int
    kd_temperature: float
    kd_weight: float
    keep_checkpoints: int
    keep_weight: float
    kl_direction: Literal["server_client", "client_server"]
    kl_scale: Literal["per_sample", "per_parameter", "none"]
    kl_weight: float
    l1_weight: float
    l2p_eval_batchwise: bool
    l2p_key_weight: float
    l2p_length: int
    l2p_size: int
    l2p_top_k: int
    l2p_train_batchwise: bool
    label_temperature: float
    label_weight: float
    label_width: int
    labelled: float
    lane_mode: Literal["auto", "loop", "vmap", "unroll"]
    lanes: int
    latent_batch: int
    latents: Literal["generated", "gaussian"]
    local_classes: Literal["current", "all", "seen"]
    local_lora: Literal["sum", "current", "products"]
    logit_norm: float
    long_tail: Literal["applied", "reported"]
    lora_blocks: int
    lora_init: Literal["kaiming_uniform", "gaussian"]
    lora_lr: float
    lora_pairs: Literal["task", "one"]
    lora_rank: int
    loss_weight: float
    loss_weights: Literal["over_total", "per_class", "uniform"]
    lr: float
    lr_divisor: float
    lr_milestones: str
    lr_schedule: (
        Literal[
            "constant", "cosine", "step", "cosine_lag", "epoch_cosine", "epoch_cosine_lag", "step_in_round"
        ]
        | LearningRateSchedule
    )
    malicious: int
    mask_ratio: float
    mask_start: float
    mask_weight: float
    match_start: Literal["grey", "normal"]
    match_steps: int
    mc_samples: int
    mc_test_samples: int
    mean_features: Literal["trajectory", "clean"]
    memory_first: float
    memory_last: float
    memory_repeats: bool
    memory_size: int
    merge: Literal["conflation", "tempered", "average"]
    meta_update: Literal["fomaml", "reptile"]
    microbatch: int
    min_examples: int
    momentum: float
    monitor_images: int
    monitor_padding: float
    move_on: float
    mse_weight: float
    negatives: Literal["seen", "all"]
    new_clients: int
    noise_lr: float
    noise_width: int
    norm_bound: float
    normalise: Literal["checkpoint", "release", "half", "unit", "imagenet", "clip", "cifar100"]
    off_diagonal: float
    optimiser: Literal["adam", "sgd", "adamw"] | ClientOptimiser | OptaxOptimiser
    orthogonality_weight: float
    pair_gram: Literal["diagonal", "full"]
    participation: float
    personal_weight: float
    pool_blocks: int
    pool_length: int
    pool_size: int
    population: Literal["static", "redrawn", "independent", "online"]
    positions: Literal["antialiased", "plain"]
    predict_classes: Literal["seen", "all"]
    preprocess: Literal["fppl", "pmae", "pilora", "hepco", "hepco_domainnet"]
    previous_weight: float
    prior_weight: float
    projection: int
    prompt_blocks: int
    prompt_length: int
    prompt_upload: Literal["current", "all"]
    proto_distance: Literal["examples", "means"]
    proto_mean: Literal["examples", "clients"]
    proto_predict: Literal["linear", "nearest"]
    proto_weight: float
    prototype_decay: float
    prototype_download: Literal["current", "seen"]
    prototype_init: float
    prototype_lr: float
    prototype_steps: int
    prototype_view: Literal["augmented", "clean"]
    prototype_weight: float
    prox_weight: float
    prune_threshold: float
    pseudo_labels: bool
    quiet_share: float
    rank: int
    rate_factor: float
    recon_denorm: bool
    recon_length: int
    recon_weight: float
    reduction: Literal["mean", "sum"]
    remat: bool
    replay_ratio: float
    reset_best: Literal["arrival", "second", "never"]
    restore_images: int
    retroactive: bool
    reviewer_share: float
    reweight_distance: Literal["l2", "l2sq"]
    reweight_mode: Literal["divide", "multiply"]
    reweight_temperature: float
    ridge: float
    ridge_choice: Literal["all", "task", "fixed"]
    rotation_margin: float
    rounds: int
    scale: Literal["auto", "paper", "mini", "fit"]
    seed: int
    server_batch: int
    server_batch_size: int | None
    server_epochs: int
    server_lr: float | None
    server_rank: int
    server_steps: int
    signature_epochs: int
    signature_share: float
    signature_tasks: int
    sketch_columns: int
    skip_corrupt: bool
    smooth_weight: float
    sparse_weight: float
    split_ratio: float
    statistics: Literal["second", "first"]
    statistics_weight: float
    stay_behind: Literal["keep", "leave"]
    stem: Literal["auto", "imagenet", "cifar"]
    stop_when_flat: int
    store_size: int | None
    student_lr: float
    student_steps: int
    student_temperature: float
    subspace_growth: float
    subspace_share: float
    surrogate: str
    surrogate_images: int
    synthesis_batch: int
    synthesis_rounds: int
    synthesis_warmup: int
    synthetic_batch: int
    task_order: str
    task_pool: Literal["same", "order", "superclasses", "sources"] | TaskPool
    task_pool_classes: int
    task_pool_limit: int
    task_sizes: str | Sequence[int]
    tasks_by: str
    temperature: float
    train_share: float
    tune_batch: int
    tune_epochs: int
    tune_lr: float
    unified_average: Literal["holders", "batch"]
    unified_weight: float
    verify: bool
    virtual_features: int
    vpt_blocks: int
    vpt_length: int
    warmup_rounds: int
    weight_decay: float
    wo_classifier_distillation: bool
    wo_cpa: bool
    wo_debias: bool
    wo_fusion: bool
    wo_kl: bool
    wo_lcdc: bool
    wo_mse: bool
    wo_orthogonality: bool
    wo_pool: bool
    wo_previous: bool
    wo_prompt_distillation: bool
    wo_recon_prompt: bool
    wo_restore_pool: bool
    wo_reweight: bool
    wo_unified: bool
