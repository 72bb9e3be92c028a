#include <metal_stdlib>

namespace pion {

// Finite, so that no exponent below is ever inf - inf.
constant constexpr float LOWEST = -3.402823466e+38f;

// The softmax of one query row over the keys that one simdgroup has seen so far: for their scores
// s and values v, top = max s, sum = sum exp(s - top), out = sum exp(s - top) v (the online softmax
// of Milakov and Gimelshein, arXiv:1805.02867). Of D components a lane holds every 32nd, E in all:
// lanes then read neighbouring addresses whatever D is.
template <int E>
struct Running {
    float top;
    float sum;
    float out[E];
};

template <int E>
inline void start(thread Running<E>& row) {
    row.top = LOWEST;
    row.sum = 0;
    for (int j = 0; j < E; ++j) {
        row.out[j] = 0;
    }
}

template <int E>
inline void add(thread Running<E>& row, const thread float* query, const thread float* key,
                const thread float* value) {
    float score = 0;
    for (int j = 0; j < E; ++j) {
        score += query[j] * key[j];
    }
    score = metal::simd_sum(score);
    const float top = metal::max(row.top, score);
    const float kept = metal::exp(row.top - top);
    const float weight = metal::exp(score - top);
    row.top = top;
    row.sum = row.sum * kept + weight;
    for (int j = 0; j < E; ++j) {
        row.out[j] = row.out[j] * kept + weight * value[j];
    }
}

template <int E, typename T>
inline void load(thread float* to, const device T* from, uint lane) {
    for (int j = 0; j < E; ++j) {
        to[j] = static_cast<float>(from[j * 32 + lane]);
    }
}

// Rows `from` and up see one token; key and value are read once for all of them. `from` is the
// same in all lanes of a simdgroup, so that none is missing in a sum.
template <int E, int ROWS, typename T>
inline void see(thread Running<E>* rows, const thread float* queries, const device T* key,
                const device T* value, uint lane, int from) {
    float keys[E];
    float values[E];
    load<E>(keys, key, lane);
    load<E>(values, value, lane);
    for (int r = 0; r < ROWS; ++r) {
        if (r >= from) {
            add<E>(rows[r], queries + r * E, keys, values);
        }
    }
}

}  // namespace pion
