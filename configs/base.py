"""The schema: every key, its default and its unit. Every other config starts from it and states what differs.

An open key (a placeholder) is filled in by the place that its comment names, so `--config.model.family=flash_quad`
alone turns any config into another family of the same size.
"""

from ml_collections import ConfigDict, config_dict


def get_config() -> ConfigDict:
    open_int = lambda: config_dict.placeholder(int)
    open_str = lambda: config_dict.placeholder(str)
    open_bool = lambda: config_dict.placeholder(bool)

    config = ConfigDict()
    config.task = "causal_lm"  # causal_lm | masked_lm
    config.seed = 0

    config.model = model = ConfigDict()
    model.family = "flash"  # a row of flash_lm/models/families.py
    model.num_layers = 4  # one layer = attention + feed-forward, or two GAUs
    model.model_dim = 128  # D
    model.num_heads = 4  # H; of a GAU see gau_heads
    model.mlp_dim = open_int()  # open: 4 D for an MLP, 8 D / 3 rounded up to a multiple of 8 for a GLU
    model.expanded_dim = open_int()  # E of a GAU; open: 2 D
    model.shared_dim = 64  # S, width of the queries and keys of a GAU
    model.gau_heads = 1  # heads of a GAU, that share Z and split E
    model.query_key = "scale_offset"  # scale_offset (of one Z) | dense (each of a Z of its own), of a GAU
    model.chunk_size = 128  # C, tokens; performer takes the power of two below
    model.window_size = 32  # tokens that are nearer than this have a position bias, of aft_local and aft_conv
    model.bias_dim = 64  # width of the factors of AFT's position bias
    model.bias_rate = 3.0  # times the learning rate, of those factors: each pair of positions learns from few tokens
    model.num_features = open_int()  # random features a head of performer; open: K ln K of the head's width K
    model.redraw_features = False  # new ones for each microbatch of training; false: one draw for all
    model.max_length = 512  # tokens; bounds learned positions and the decode cache
    model.vocab_size = open_int()  # open: from the tokenizer
    model.causal = open_bool()  # open: from the task
    model.tie_embeddings = True
    model.head = "softmax"  # softmax | logistics (a mixture over the 256 values of a byte, for images)
    model.mixtures = 10  # logistics of that head
    model.init = "normal"  # normal (standard deviation 0.02) | lecun (1 / sqrt(fan in))
    model.norm = open_str()  # layer | rms | scale; open: from the family
    model.absolute_positions = open_str()  # none | learned | sinusoid | scaled_sinusoid; open: from the family
    model.rotary = open_bool()  # rotary position embedding of queries and keys; open: from the family
    model.relative_bias = open_str()  # none | t5 | toeplitz | rope, of a GAU; open: from the family
    model.attention_function = "relu2"  # relu2 | softmax | laplace, of a GAU
    model.normalizer = open_str()  # count | length | paper | an integer; open: count if causal, else data.length
    model.local_attention = True  # attention inside the chunk
    model.overlapping_chunks = False  # it reaches into the neighbouring chunks, too; not to be decoded
    model.global_attention = True  # linear attention over the chunks
    model.attention_implementation = "blocked"  # plain | blocked | cudnn (softmax, a GPU), of quadratic attention
    model.kernels = "auto"  # auto (Pallas kernels on GPU and TPU, where the shapes suit them) | xla | pallas
    model.dropout = 0.0  # of the embedding and of each sublayer's output
    model.dtype = "float32"  # of activations; docs/numerics.md tells what stays float32, and what accelerators round
    model.param_dtype = "float32"
    model.scan_layers = True  # one compiled layer, scanned; false unrolls: longer to compile, on CPU often faster
    model.remat = "none"  # none | products (keep matrix products) | full (keep only each layer's input)

    config.data = data = ConfigDict()
    data.corpus = "stdlib"  # stdlib | text | hf (Hugging Face datasets) | copy | couplets | images (examples)
    # text: a file or a glob; hf: a folder, file or glob of parquet, arrow or json; couplets and images: a folder
    data.path = open_str()
    data.name = open_str()  # hf and images: a data set on the hub, in place of a path
    data.config = open_str()  # hf: one of the configs of that data set; open: its only one
    data.split = "train"  # hf: trained on; validation and test are its own, or else held out of this one
    data.text_column = "text"  # hf
    data.streaming = False  # hf: read while training, with nothing of the training split on the disk
    # of a stream: millions of characters whose documents are put into random order; 0 = as they come; open: 64
    data.shuffle_buffer = open_int()
    data.tokenizer = "sentencepiece"  # bytes | sentencepiece
    data.tokenizer_path = open_str()  # a SentencePiece model; open: trained on the corpus
    data.vocab_size = 8192  # of the SentencePiece model to train
    data.length = open_int()  # L, tokens a row; open: model.max_length
    data.tokens_per_batch = 2048  # B x L
    data.pack = "stream"  # stream (documents joined and cut) | documents (isolated segments) | examples (one a row)
    data.mask_rate = 0.15  # of masked_lm: share of the tokens that are to be predicted
    data.cache_dir = "~/.cache/flash_lm"  # tokenised corpora

    config.train = train = ConfigDict()
    train.steps = 300
    train.optimizer = "adamw"  # adamw | radam | lion | adafactor | lamb
    train.learning_rate = 3e-3  # peak
    train.end_learning_rate = 0.0  # of linear and cosine, after the last step
    train.warmup_steps = open_int()  # open: a tenth of the steps
    train.schedule = "linear"  # linear | cosine | step | constant, after the warm-up
    train.decay_steps = open_int()  # of linear and cosine: the last so many, after a constant rate; open: all of them
    train.boundaries = ()  # of step: the steps from which on the rate is a tenth of what it was
    train.b1 = 0.9
    train.b2 = 0.999
    train.eps = 1e-8  # gradients of AFT's position bias begin at 1e-7; a larger one holds them still
    train.weight_decay = 0.01  # of matrices; not of gains, offsets and biases
    train.clip = 1.0  # largest norm of the gradient; 0 = off
    train.clip_mode = "global"  # global (the norm of all) | parameter (of each parameter of each layer)
    train.accumulate = 1  # microbatches a step
    train.on_nonfinite = "stop"  # stop | skip: what a step does whose loss or gradient is not finite
    train.loss_chunk = 1024  # tokens whose logits exist at the same time on a device
    train.log_every = 10  # steps
    train.eval_every = 100  # steps; 0 = only at the end
    train.eval_steps = 0  # batches an evaluation during training; 0 = the whole split
    train.checkpoint_every = 100  # steps; 0 = only at the end
    train.keep = 2  # newest checkpoints kept, beside the best
    train.best_metric = "loss"  # of the validation split; the lowest is the best
    train.branch_from = open_str()  # RUN[@best|@STEP]: state, step and data order go on from there, in a new workdir

    config.mesh = mesh = ConfigDict()
    mesh.shape = (-1, 1, 1)  # devices along (data, fsdp, tensor); one may be -1: the rest
    # The first rule whose regex is found in the parameter's path. The spec names the mesh axis of each dimension, the
    # stacked layers' dimension excepted. A matrix that no rule names is cut over fsdp, along its largest dimension.
    mesh.rules = (
        ("embedding", ("tensor", "fsdp")),
        ("shared/kernel", ("fsdp", None)),  # one head: to cut it would send scores instead of values
        ("(query|key|value|gate|up)/kernel", ("fsdp", "tensor")),
        ("(output|down)/kernel", ("tensor", "fsdp")),
        ("(query|key)_position", (None, "fsdp")),
    )
    return config
