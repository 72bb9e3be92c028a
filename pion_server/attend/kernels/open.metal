    // A threadgroup answers ROWS query rows of one head for one slice of the keys. Simdgroups take
    // turns at them: key `turn` is ours, and then every `turns`-th.
    constexpr int E = D / 32;
    const uint lane = thread_index_in_simdgroup;
    const int group = simdgroup_index_in_threadgroup;
    const int head = threadgroup_position_in_grid.y;
    const int kv_head = head_map[head];
    const int many = q_shape[1];
    const int row0 = threadgroup_position_in_grid.x * ROWS;
    const int tokens = k_shape[1];
    const int first = sizes[0];
    const int slice = threadgroup_position_in_grid.z;
    const int turn = slice * GROUPS + group;
    const int turns = sizes[2] * GROUPS;

    pion::Running<E> rows[ROWS];
    float queries[ROWS * E];
    for (int r = 0; r < ROWS; ++r) {
        // Rows beyond the last repeat it and are not written: every thread must reach the barriers.
        const int row = metal::min(row0 + r, many - 1);
        pion::load<E>(queries + r * E, q + (size_t(head) * many + row) * D, lane);
        for (int j = 0; j < E; ++j) {
            queries[r * E + j] *= scale;
        }
        pion::start<E>(rows[r]);
    }
    const device T* keys = k + size_t(kv_head) * tokens * D;
    const device T* values = v + size_t(kv_head) * tokens * D;
