    for (int n = first + group; n < tokens; n += GROUPS) {
        pion::see<E, ROWS>(rows, queries, keys + size_t(n) * D, values + size_t(n) * D, lane, 0);
    }
