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

constexpr std::size_t lanes = 8;  // block_elems is a multiple
using Lanes = double __attribute__((vector_size(lanes * sizeof(double))));
using Mask = std::int64_t __attribute__((vector_size(lanes * sizeof(double))));

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

// What the squares of a block, in whole lanes, add up to. Whole numbers below 2**52 add up in any
// order, which a compiler does not know: hence lanes.
FOREPROP_CLONES inline SquareSum add_up(const double* squares, std::size_t elems) {
    SquareSum sum;
    Lanes most{}, each;
    Mask finite = most == most;
    for (std::size_t i = 0; i < elems; i += lanes) {
        __builtin_memcpy(&each, squares + i, sizeof each);
        finite &= each < std::numeric_limits<double>::infinity();
        most = each > most ? each : most;
    }
    double largest = 0;
    bool are_finite = true;
    for (std::size_t n = 0; n < lanes; ++n) {
        largest = most[n] > largest ? most[n] : largest;
        are_finite = are_finite && finite[n];
    }
    if (!are_finite) {
        for (std::size_t i = 0; i < elems; ++i)
            if (!std::isfinite(squares[i])) sum.beyond += squares[i];
        return sum;
    }
    if (largest == 0) return sum;
    const int exponent = std::ilogb(largest);
    const int bin = (exponent - (exponent < 0 ? SquareSum::bin_bits - 1 : 0)) / SquareSum::bin_bits;
    sum.top = std::max(bin, SquareSum::least_top);
    const double scale = std::ldexp(1.0, -sum.top * SquareSum::bin_bits);
    const Lanes one = Lanes{} + 1.0, whole = Lanes{} + 0x1p52;  // above, there are no fractions
    Lanes totals[SquareSum::bins] = {};
    for (std::size_t i = 0; i < elems; i += lanes) {
        __builtin_memcpy(&each, squares + i, sizeof each);
        each *= scale;
        for (Lanes& total : totals) {
            Lanes floor = (each + whole) - whole;
            floor = floor > each ? floor - one : floor;
            total += floor;
            each = (each - floor) * 0x1p28;
        }
    }
    for (int each_bin = 0; each_bin < SquareSum::bins; ++each_bin)
        for (std::size_t n = 0; n < lanes; ++n)
            sum.sums[each_bin] += static_cast<std::int64_t>(totals[each_bin][n]);
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
        const std::size_t in_lanes = (count + lanes - 1) / lanes * lanes;
        std::fill(squares + count, squares + in_lanes, 0.0);
        total.add(add_up(squares, in_lanes));
    }
    return total;
}

}  // namespace foreprop
