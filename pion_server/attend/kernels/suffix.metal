    // The queries are the last M suffix positions: query m sees positions 0..max(S - M, 0) + m.
    const int suffix = sizes[1];
    const int offset = metal::max(suffix - many, 0);
    const int end = metal::min(suffix, offset + row0 + ROWS);
    const auto suffix_keys = suffix_k + size_t(kv_head) * suffix_k_shape[1] * D;
    const auto suffix_values = suffix_v + size_t(kv_head) * suffix_k_shape[1] * D;
    for (int n = turn; n < end; n += turns) {
        pion::see<E, ROWS>(rows, queries, suffix_keys + size_t(n) * D, suffix_values + size_t(n) * D,
                           lane, n - offset - row0);
    }
