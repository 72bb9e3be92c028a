    // Join what the simdgroups have seen. Two barriers a row are enough: nobody writes `parts` for
    // the next row before all have passed its first barrier, hence read them for this one.
    threadgroup float tops[GROUPS];
    threadgroup float sums[GROUPS];
    threadgroup float parts[GROUPS * D];
    const int thread_index = group * 32 + lane;
    for (int r = 0; r < ROWS; ++r) {
        if (lane == 0) {
            tops[group] = rows[r].top;
            sums[group] = rows[r].sum;
        }
        metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
        float one_top = pion::LOWEST;
        float one_sum = 0;
        if (lane < GROUPS) {
            one_top = tops[lane];
            one_sum = sums[lane];
        }
        const float top = metal::simd_max(one_top);
        const float total = metal::simd_sum(one_sum * metal::exp(one_top - top));
        const float weight = metal::exp(rows[r].top - top);
        for (int j = 0; j < E; ++j) {
            parts[group * D + j * 32 + lane] = rows[r].out[j] * weight;
        }
        metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
        if (row0 + r < many) {
            const size_t row = (size_t(slice) * q_shape[0] + head) * many + row0 + r;
            for (int d = thread_index; d < D; d += GROUPS * 32) {
                float part = 0;
                for (int g = 0; g < GROUPS; ++g) {
                    part += parts[g * D + d];
                }
                // A row that sees no key at all is zero, of weight zero.
                out[row * D + d] = total == 0 ? 0 : part / total;
            }
            if (thread_index == 0) {
                lse[row] =
                    total == 0 ? -metal::numeric_limits<float>::infinity() : top + metal::log(total);
            }
        }
    }
