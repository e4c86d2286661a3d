"""Decoder-only transformers on flax nnx.

    model = build_model(config, dtype=jnp.bfloat16, attention=AttentionImplementation.XLA, page_size=16)   # shapes only
    load_weights(model, reader, config, mesh)                # sglang_jax.jax_runner.weights; or initialize_weights
    kv_caches = allocate(kv_cache_spec(config, dtype, num_pages, page_size), mesh)   # a tuple: one array per layer
    graph, state = nnx.split(model)
    hidden, kv_caches = model(batch, kv_caches)              # [T, hidden_size]; donate kv_caches
    logits = model.logits(hidden)                            # float32 [..., vocab_size]
"""
