    for (int n = first + turn; n < tokens; n += turns) {
        pion::see<E, ROWS>(rows, queries, keys + size_t(n) * D, values + size_t(n) * D, lane, 0);
    }
