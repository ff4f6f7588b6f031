/* bfloat16 and float16 as float and back, rounded to nearest even or at random; without branches,
   so that compilers can vectorise loops over them. */

#ifndef ADAMO_FLOATS_H
#define ADAMO_FLOATS_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

static inline float as_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t as_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float from_bfloat16(uint16_t x)
{
    return as_float((uint32_t)x << 16);
}

static inline uint16_t to_bfloat16(float x)
{
    const uint32_t bits = as_bits(x), odd = bits >> 16 & 1;
    return (uint16_t)(x != x ? 0x7FC0 : (bits + 0x7FFF + odd) >> 16);
}

/* Up or down with the probabilities that make the mean exact: geometry.round_stochastically. The
   random bits are a hash (Wellons' lowbias32) of the place in memory and a key. */
static inline uint16_t to_bfloat16_at_random(float x, uint32_t place, uint32_t key)
{
    uint32_t hash = place * 0x9E3779B1 + key;
    hash = (hash ^ hash >> 16) * 0x7FEB352D;
    hash = (hash ^ hash >> 15) * 0x846CA68B;
    hash ^= hash >> 16;
    const uint32_t bits = as_bits(x);
    const bool is_finite = (bits & 0x7F800000) != 0x7F800000;
    return (uint16_t)(is_finite ? (bits + (hash & 0xFFFF)) >> 16 : to_bfloat16(x));
}

/* The exponent is moved by a multiplication, which also normalises float16's denormals. */
static inline float from_float16(uint16_t x)
{
    const uint32_t sign = (uint32_t)(x & 0x8000) << 16, magnitude = (uint32_t)(x & 0x7FFF) << 13;
    const bool is_finite = (x & 0x7C00) != 0x7C00;
    const uint32_t moved = as_bits(as_float(magnitude) * 0x1p112f);
    return as_float(sign | (is_finite ? moved : magnitude | 0x7F800000));
}

/* Denormals are rounded by adding 0.5, whose last bit is float16's smallest number. */
static inline uint16_t to_float16(float x)
{
    const uint32_t sign = as_bits(x) >> 16 & 0x8000, bits = as_bits(x) & 0x7FFFFFFF;
    const uint32_t odd = bits >> 13 & 1;
    const uint32_t normal = (bits - 0x38000000 + 0xFFF + odd) >> 13;
    const uint32_t denormal = as_bits(as_float(bits) + 0.5f) - 0x3F000000;
    const uint32_t magnitude = bits > 0x7F800000 ? 0x7E00 /* NaN */
        : bits >= 0x47800000                     ? 0x7C00 /* 2¹⁶ and more: infinite */
        : bits < 0x38800000                      ? denormal /* below 2⁻¹⁴ */
                                                 : normal;
    return (uint16_t)(sign | magnitude);
}

#endif
