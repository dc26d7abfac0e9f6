/* Arithmetic: one value out of every rank's, in the order of ranks, whoever computes it.
 *
 * Half types are widened to float, combined there and rounded once. minimum and maximum pass NaN on, as torch.minimum does. Loops are plain C;
 * the compiler makes AVX2 and AVX-512 copies of them and the loader picks one (on ARM, NEON is always there). All ranks of a group run on one
 * machine, and no loop may fuse a multiplication with an addition (-ffp-contract=off), so that every copy gives the same bits.
 */
#ifndef LOCKSTEP_REDUCE_H
#define LOCKSTEP_REDUCE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum op { NO_OP = 0, SUM, AVERAGE, PRODUCT, MINIMUM, MAXIMUM, BIT_AND, BIT_OR, BIT_XOR };
enum type { F32 = 0, F64, F16, BF16, U8, I8, U16, I16, U32, I32, U64, I64, TYPES };

static const size_t WIDTHS[TYPES] = {4, 8, 2, 2, 1, 1, 2, 2, 4, 4, 8, 8};

/* The loader cannot choose a copy under a sanitizer: its own code would not be ready yet. */
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__) && !defined(PLAIN)
#define IN_COPIES __attribute__((target_clones("default", "avx2", "arch=skylake-avx512")))
#else
#define IN_COPIES
#endif

/* `out` may be `a` or `b` itself, never a shifted part of it: no iteration depends on another. */
#if defined(__clang__)
#define EACH _Pragma("clang loop vectorize(assume_safety)") for (size_t i = 0; i < n; i++)
#else
#define EACH _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++)
#endif

#define ARITHMETIC(T)                                                                  \
    case SUM:                                                                          \
    case AVERAGE: EACH ((T *)out)[i] = (T)(((const T *)a)[i] + ((const T *)b)[i]); break; \
    case PRODUCT: EACH ((T *)out)[i] = (T)(((const T *)a)[i] * ((const T *)b)[i]); break; \
    case MINIMUM: EACH {                                                               \
            T x = ((const T *)a)[i], y = ((const T *)b)[i];                            \
            ((T *)out)[i] = (x < y || x != x) ? x : y;                                 \
        }                                                                              \
        break;                                                                         \
    case MAXIMUM: EACH {                                                               \
            T x = ((const T *)a)[i], y = ((const T *)b)[i];                            \
            ((T *)out)[i] = (x > y || x != x) ? x : y;                                 \
        }                                                                              \
        break;

#define BITS(T)                                                                   \
    case BIT_AND: EACH ((T *)out)[i] = ((const T *)a)[i] & ((const T *)b)[i]; break; \
    case BIT_OR: EACH ((T *)out)[i] = ((const T *)a)[i] | ((const T *)b)[i]; break;  \
    case BIT_XOR: EACH ((T *)out)[i] = ((const T *)a)[i] ^ ((const T *)b)[i]; break;

#define FLOATING(T)      \
    switch (op) {        \
        ARITHMETIC(T)    \
        default: break;  \
    }                    \
    break;

#define WHOLE(T)         \
    switch (op) {        \
        ARITHMETIC(T)    \
        BITS(T)          \
        default: break;  \
    }                    \
    break;

/* out = a op b, element by element; half types do not come here. */
IN_COPIES static void combine(enum op op, enum type type, void *out, const void *a, const void *b, size_t n) {
    switch (type) {
        case F32: FLOATING(float)
        case F64: FLOATING(double)
        case U8: WHOLE(uint8_t)
        case I8: WHOLE(int8_t)
        case U16: WHOLE(uint16_t)
        case I16: WHOLE(int16_t)
        case U32: WHOLE(uint32_t)
        case I32: WHOLE(int32_t)
        case U64: WHOLE(uint64_t)
        case I64: WHOLE(int64_t)
        default: break;
    }
}

IN_COPIES static void divide(enum type type, void *x, int by, size_t n) {
    if (type == F64) {
        EACH ((double *)x)[i] /= by;
    } else {
        EACH ((float *)x)[i] /= (float)by;
    }
}

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* Shift exponent and fraction into place and scale by 2^112, which is right for subnormals as well; infinity and NaN get the full exponent. */
static inline float widen_f16(uint16_t half) {
    float scaled = float_of((uint32_t)(half & 0x7fff) << 13) * 0x1p112f;
    uint32_t bits = bits_of(scaled) | ((half & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u);
    return float_of(bits | (uint32_t)(half & 0x8000) << 16);
}

/* Round to nearest, ties to even. The subnormal case lets the float adder round: 0.5 has its last bit where a subnormal half has it. */
static inline uint16_t narrow_f16(float x) {
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000;
    uint32_t size = bits & 0x7fffffff;
    uint32_t normal = (size - 0x38000000u + 0xfffu + (size >> 13 & 1)) >> 13;
    uint32_t subnormal = bits_of(float_of(size) + 0.5f) - 0x3f000000u;
    uint32_t half = size < 0x38800000u ? subnormal : normal;
    half = size >= 0x477ff000u ? 0x7c00u : half; /* 65520 and more round to infinity */
    half = size > 0x7f800000u ? 0x7e00u : half;  /* NaN */
    return (uint16_t)(sign | half);
}

static inline uint16_t narrow_bf16(float x) {
    uint32_t bits = bits_of(x);
    uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000u ? (bits >> 16 | 0x40u) : rounded);
}

IN_COPIES static void widen(enum type type, float *out, const uint16_t *in, size_t n) {
    if (type == F16) {
        EACH out[i] = widen_f16(in[i]);
    } else {
        EACH out[i] = float_of((uint32_t)in[i] << 16);
    }
}

IN_COPIES static void narrow(enum type type, uint16_t *out, const float *in, size_t n) {
    if (type == F16) {
        EACH out[i] = narrow_f16(in[i]);
    } else {
        EACH out[i] = narrow_bf16(in[i]);
    }
}

enum { BLOCK = 1024 }; /* elements that stay in the first cache while all ranks' are combined */

static void reduce_halves(enum op op, enum type type, uint16_t *out, const char *const *in, int ranks, size_t from, size_t n) {
    float sum[BLOCK], next[BLOCK];
    widen(type, sum, (const uint16_t *)in[0] + from, n);
    for (int r = 1; r < ranks; r++) {
        widen(type, next, (const uint16_t *)in[r] + from, n);
        combine(op, F32, sum, sum, next, n);
    }
    if (op == AVERAGE) divide(F32, sum, ranks, n);
    narrow(type, out + from, sum, n);
}

/* One block. What is in between stays in `middle`: `out` may be the input of a rank whose turn has not come yet. */
static void reduce_block(enum op op, enum type type, char *out, const char *const *in, int ranks, size_t from, size_t n) {
    size_t width = WIDTHS[type], at = from * width;
    uint64_t middle[BLOCK];
    const void *so_far = in[0] + at;
    for (int r = 1; r < ranks; r++) {
        void *to = r == ranks - 1 ? (void *)(out + at) : (void *)middle;
        combine(op, type, to, so_far, in[r] + at, n);
        so_far = to;
    }
    if (ranks == 1) memmove(out + at, in[0] + at, n * width);
    if (op == AVERAGE) divide(type, out + at, ranks, n);
}

/* out[i] = in[0][i] op in[1][i] op ... for `count` elements; `copy`, if there is one, gets the same. */
static void reduce_all(enum op op, enum type type, char *out, char *copy, const char *const *in, int ranks, size_t count) {
    size_t width = WIDTHS[type];
    for (size_t from = 0; from < count; from += BLOCK) {
        size_t n = count - from < BLOCK ? count - from : BLOCK;
        if (type == F16 || type == BF16) {
            reduce_halves(op, type, (uint16_t *)out, in, ranks, from, n);
        } else {
            reduce_block(op, type, out, in, ranks, from, n);
        }
        if (copy) memcpy(copy + from * width, out + from * width, n * width);
    }
}

#endif
