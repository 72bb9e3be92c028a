    // Each head has a list of its own, unless there is one for all.
    const int list = indices_shape[0] == 1 ? 0 : head;
    const int length = metal::min(int(counts[list]), indices_shape[1]);
    for (int i = turn; i < length; i += turns) {
        const int n = indices[size_t(list) * indices_shape[1] + i];
        if (n >= first && n < tokens) {
            pion::see<E, ROWS>(rows, queries, keys + size_t(n) * D, values + size_t(n) * D, lane, 0);
        }
    }
