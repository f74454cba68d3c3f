// `engine.sums`: gradients added up in the order of the ranks, and the mean of them, with the bits
// of torch's kernels on CPUs. Compile with -ffp-contract=off: a product and a sum in one
// instruction round once where torch rounds twice.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace foreprop {

enum class Dtype { float32, float64, bfloat16, float16 };

constexpr std::size_t itemsize(Dtype dtype) {
    return dtype == Dtype::float64 ? 8 : dtype == Dtype::float32 ? 4 : 2;
}

// Half precision, as bits. What is computed of them is computed in float32.
struct Bfloat16 {
    std::uint16_t bits;
    operator float() const { return std::bit_cast<float>(std::uint32_t{bits} << 16); }
    static Bfloat16 of(float value) {  // to nearest, ties to even
        const auto wide = std::bit_cast<std::uint32_t>(value);
        const bool is_nan = (wide & 0x7fffffff) > 0x7f800000;
        const std::uint32_t rounded = (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
        return {static_cast<std::uint16_t>(is_nan ? 0x7fc0 : rounded)};
    }
};

struct Float16 {
    std::uint16_t bits;
    operator float() const {
        const std::uint32_t sign = (bits & 0x8000u) << 16, rest = (bits & 0x7fffu) << 13;
        const std::uint32_t exponent = rest & 0x0f800000;
        // Infinities and NaN have the largest exponent in either format; subnormal numbers are
        // normalised by the subtraction of what the hidden bit is worth.
        std::uint32_t wide = rest + (112u << 23);
        if (exponent == 0x0f800000) wide += 112u << 23;
        if (exponent == 0) {
            const float normal = std::bit_cast<float>(wide + (1u << 23)) -
                                 std::bit_cast<float>(std::uint32_t{113u << 23});
            wide = std::bit_cast<std::uint32_t>(normal);
        }
        return std::bit_cast<float>(wide | sign);
    }
    static Float16 of(float value) {  // to nearest, ties to even
        const auto wide = std::bit_cast<std::uint32_t>(value);
        const std::uint32_t sign = wide & 0x80000000, rest = wide ^ sign;
        std::uint32_t half;
        if (rest > 0x7f800000) {
            half = 0x7e00;
        } else if (rest >= 0x477ff000) {  // 65520 and more round to infinity
            half = 0x7c00;
        } else if (rest < 0x38800000) {  // subnormal: an addition rounds where the last bit is
            const float aligned = std::bit_cast<float>(rest) + 0.5f;
            half = std::bit_cast<std::uint32_t>(aligned) - 0x3f000000;
        } else {
            half = (rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13;
        }
        return {static_cast<std::uint16_t>(sign >> 16 | half)};
    }
};

template <class To, class From>
inline To converted(From value) {
    if constexpr (requires { To::of(value); }) {
        return To::of(static_cast<float>(value));
    } else {
        return static_cast<To>(value);
    }
}

// Calls `make` with a null pointer to elements of the type.
template <class Make>
void of_type(Dtype dtype, Make make) {
    switch (dtype) {
        case Dtype::float32: return make(static_cast<float*>(nullptr));
        case Dtype::float64: return make(static_cast<double*>(nullptr));
        case Dtype::bfloat16: return make(static_cast<Bfloat16*>(nullptr));
        case Dtype::float16: return make(static_cast<Float16*>(nullptr));
    }
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(FOREPROP_SANITIZED)
#define FOREPROP_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOREPROP_CLONES
#endif

namespace sums_detail {

// A block stays in the first cache while all ranks' parts are added to it.
constexpr std::size_t block_elems = 2048;

// GCC makes no clones of templates: these are the loops that matter.
#define FOREPROP_LOOPS(Wide)                                                              \
    FOREPROP_CLONES inline void add(Wide* __restrict total, const Wide* __restrict part,  \
                                    std::size_t elems) {                                  \
        for (std::size_t i = 0; i < elems; ++i) total[i] += part[i];                      \
    }                                                                                     \
    FOREPROP_CLONES inline void add_both(Wide* __restrict total, const Wide* first,       \
                                         const Wide* second, std::size_t elems) {         \
        for (std::size_t i = 0; i < elems; ++i) total[i] = first[i] + second[i];          \
    }                                                                                     \
    FOREPROP_CLONES inline void divide(Wide* total, Wide by, std::size_t elems) {         \
        for (std::size_t i = 0; i < elems; ++i) total[i] /= by;                           \
    }                                                                                     \
    FOREPROP_CLONES inline void multiply(Wide* total, Wide by, std::size_t elems) {       \
        for (std::size_t i = 0; i < elems; ++i) total[i] *= by;                           \
    }
FOREPROP_LOOPS(float)
FOREPROP_LOOPS(double)
#undef FOREPROP_LOOPS

#define FOREPROP_CONVERSIONS(Half)                                                        \
    FOREPROP_CLONES inline void widen(float* __restrict to, const Half* __restrict from,  \
                                      std::size_t elems) {                                \
        for (std::size_t i = 0; i < elems; ++i) to[i] = from[i];                          \
    }                                                                                     \
    FOREPROP_CLONES inline void narrow(Half* __restrict to, const float* __restrict from, \
                                       std::size_t elems) {                               \
        for (std::size_t i = 0; i < elems; ++i) to[i] = Half::of(from[i]);                \
    }
FOREPROP_CONVERSIONS(Bfloat16)
FOREPROP_CONVERSIONS(Float16)
#undef FOREPROP_CONVERSIONS

}  // namespace sums_detail

struct Reduction {
    bool mean;           // else the sum
    int workers;         // that the mean is of
    double scale = 1.0;  // of the loss, to be taken out
};

namespace sums_detail {

template <class Wide>
void finish(Wide* sum, std::size_t elems, const Reduction& reduction) {
    if (reduction.mean && reduction.workers > 1) {
        if (std::has_single_bit(static_cast<unsigned>(reduction.workers))) {
            multiply(sum, Wide{1} / static_cast<Wide>(reduction.workers), elems);  // the same bits
        } else {
            divide(sum, static_cast<Wide>(reduction.workers), elems);
        }
    }
    if (reduction.scale != 1.0) multiply(sum, static_cast<Wide>(1.0 / reduction.scale), elems);
}

}  // namespace sums_detail

// The reduced gradient of all parts, in the order of the ranks, as float32 or float64. `total` may
// be the first part's own memory. `also`: other memory that gets it too, if any.
template <class Wide>
void reduce(Wide* total, const std::vector<const Wide*>& parts, std::size_t elems,
            const Reduction& reduction, Wide* also = nullptr) {
    using namespace sums_detail;
    for (std::size_t first = 0; first < elems; first += block_elems) {
        const std::size_t count = elems - first < block_elems ? elems - first : block_elems;
        Wide* block = total + first;
        std::size_t part = 1;
        if (parts[0] != total && parts.size() > 1) {
            add_both(block, parts[0] + first, parts[1] + first, count);
            part = 2;
        } else if (parts[0] != total) {
            std::copy_n(parts[0] + first, count, block);
        }
        for (; part < parts.size(); ++part) add(block, parts[part] + first, count);
        finish(block, count, reduction);
        if (also) std::copy_n(block, count, also + first);
    }
}

// The same of half precision: added up in float32 (`engine.sums.sum_dtype`) and rounded once.
template <class Half>
void reduce_halves(Half* total, const std::vector<const Half*>& parts, std::size_t elems,
                   const Reduction& reduction, Half* also = nullptr) {
    using namespace sums_detail;
    float sum[block_elems], part[block_elems];
    for (std::size_t first = 0; first < elems; first += block_elems) {
        const std::size_t count = elems - first < block_elems ? elems - first : block_elems;
        widen(sum, parts[0] + first, count);
        for (std::size_t each = 1; each < parts.size(); ++each) {
            widen(part, parts[each] + first, count);
            add(sum, part, count);
        }
        finish(sum, count, reduction);
        narrow(total + first, sum, count);
        if (also) std::copy_n(total + first, count, also + first);
    }
}

struct NotFinite {
    std::int64_t elems = 0;
    bool has_nan = false;
};

// By bits, several at a time: all ones in the exponent.
template <class Each, class Bits>
NotFinite not_finite(const Each* from, std::size_t elems, Bits exponent) {
    constexpr Bits one = 1;
    const auto magnitude = [](const Each& each) {
        return static_cast<Bits>(std::bit_cast<Bits>(each) & (static_cast<Bits>(~Bits{0}) >> one));
    };
    Bits any = 0;
    for (std::size_t i = 0; i < elems; ++i) any |= magnitude(from[i]) >= exponent ? one : Bits{0};
    NotFinite found;
    for (std::size_t i = 0; any && i < elems; ++i) {
        found.elems += magnitude(from[i]) >= exponent;
        found.has_nan |= magnitude(from[i]) > exponent;
    }
    return found;
}
inline NotFinite not_finite(const float* from, std::size_t elems) {
    return not_finite(from, elems, std::uint32_t{0x7f800000});
}
inline NotFinite not_finite(const double* from, std::size_t elems) {
    return not_finite(from, elems, std::uint64_t{0x7ff0000000000000});
}
inline NotFinite not_finite(const Bfloat16* from, std::size_t elems) {
    return not_finite(from, elems, std::uint16_t{0x7f80});
}
inline NotFinite not_finite(const Float16* from, std::size_t elems) {
    return not_finite(from, elems, std::uint16_t{0x7c00});
}

}  // namespace foreprop
