// `core.norm`, `engine.sums.square_sum`: a sum of squares that has the same bits whatever parts it
// was added up from, in any order.
#pragma once

#include <cmath>
#include <limits>

#include "sums.hpp"
#include "wire.hpp"

namespace foreprop {

struct SquareSum {
    static constexpr int bin_bits = 28, bins = 3, least_top = -36;
    static constexpr std::size_t encoded_bytes = 34;
    int top = -(1 << 15);          // the bin of the largest square
    std::int64_t sums[bins] = {};  // in that bin and the next lower ones
    double beyond = 0;             // of squares that are infinite, or no numbers

    void add(const SquareSum& other) {
        const bool is_high = top >= other.top;
        const SquareSum low = is_high ? other : *this;
        const double all_beyond = beyond + other.beyond;
        if (!is_high) *this = other;
        beyond = all_beyond;
        const int lowered = top - low.top;
        for (int bin = lowered; bin < bins; ++bin) sums[bin] += low.sums[bin - lowered];
    }
    void encode(std::uint8_t* to) const {
        wire_detail::put(to, static_cast<std::uint16_t>(top));
        for (std::int64_t each : sums) wire_detail::put(to, each);
        wire_detail::put(to, std::bit_cast<std::uint64_t>(beyond));
    }
};

namespace sums_detail {

#define FOREPROP_SQUARES(Wide)                                                               \
    FOREPROP_CLONES inline void square(double* __restrict to, const Wide* __restrict from,   \
                                       std::size_t elems) {                                  \
        for (std::size_t i = 0; i < elems; ++i) {                                            \
            const auto wide = static_cast<double>(from[i]);                                  \
            to[i] = wide * wide;                                                             \
        }                                                                                    \
    }
FOREPROP_SQUARES(float)
FOREPROP_SQUARES(double)
#undef FOREPROP_SQUARES

// Their bits without the sign, which a square that is no number may have: as whole numbers they are
// in the order of the squares, and compilers look for the largest of many at once.
FOREPROP_CLONES inline std::int64_t largest_bits(const double* squares, std::size_t elems) {
    std::int64_t most = 0;
    for (std::size_t i = 0; i < elems; ++i)
        most = std::max(most, std::bit_cast<std::int64_t>(squares[i]) &
                                  std::numeric_limits<std::int64_t>::max());
    return most;
}

// Whole numbers add up in any order, which compilers know: so many at once.
FOREPROP_CLONES inline void add_bins(const double* squares, std::size_t elems, double scale,
                                     std::int64_t* sums) {
    std::int64_t high = 0, middle = 0, low = 0;
    for (std::size_t i = 0; i < elems; ++i) {
        double rest = squares[i] * scale;  // below 2**28, and so is each bin's part
        const auto first = static_cast<std::int32_t>(rest);
        rest = (rest - first) * 0x1p28;
        const auto second = static_cast<std::int32_t>(rest);
        rest = (rest - second) * 0x1p28;
        high += first;
        middle += second;
        low += static_cast<std::int32_t>(rest);
    }
    sums[0] = high;
    sums[1] = middle;
    sums[2] = low;
}

inline SquareSum add_up(const double* squares, std::size_t elems) {
    SquareSum sum;
    const auto largest = std::bit_cast<double>(largest_bits(squares, elems));
    if (!std::isfinite(largest)) {
        for (std::size_t i = 0; i < elems; ++i)
            if (!std::isfinite(squares[i])) sum.beyond += squares[i];
        return sum;
    }
    if (largest == 0) return sum;
    const int exponent = std::ilogb(largest);
    const int bin = (exponent - (exponent < 0 ? SquareSum::bin_bits - 1 : 0)) / SquareSum::bin_bits;
    sum.top = std::max(bin, SquareSum::least_top);
    add_bins(squares, elems, std::ldexp(1.0, -sum.top * SquareSum::bin_bits), sum.sums);
    return sum;
}

}  // namespace sums_detail

template <class Each>
SquareSum square_sum(const Each* from, std::size_t elems) {
    using namespace sums_detail;
    SquareSum total;
    double squares[block_elems];
    [[maybe_unused]] float wide[block_elems];
    for (std::size_t first = 0; first < elems; first += block_elems) {
        const std::size_t count = std::min(elems - first, block_elems);
        if constexpr (std::is_floating_point_v<Each>) {
            square(squares, from + first, count);
        } else {
            widen(wide, from + first, count);
            square(squares, wide, count);
        }
        total.add(add_up(squares, count));
    }
    return total;
}

}  // namespace foreprop
