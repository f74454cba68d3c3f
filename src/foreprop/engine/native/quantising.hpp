// `features.compression.quantisers`: blocks of float32 as whole numbers of a scale each, with error
// feedback. Compile with -ffp-contract=off, as sums.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include "sums.hpp"

namespace foreprop {

class Quantiser {
  public:
    // `levels`: up to 7 in 4 bits, up to 127 in 8.
    explicit Quantiser(int levels)
        : levels_(static_cast<float>(levels)), largest_(3.4e38f / levels_), halves_(levels <= 7) {}

    std::size_t size(std::size_t elems) const {
        return sizeof(float) * blocks(elems) + (halves_ ? (elems + 1) / 2 : elems);
    }

    // Of values and error, if there is one, which becomes what is left out if all are finite.
    void encode(const float* values, float* error, std::size_t elems, std::uint8_t* to) const {
        float sums[block_elems];
        std::uint8_t wide[block_elems];
        bool is_finite = true;
        const auto with_error = [&](std::size_t first, std::size_t count) {
            if (!error) return values + first;
            sums_detail::add_both(sums, values + first, error + first, count);
            return static_cast<const float*>(sums);
        };
        for (std::size_t first = 0, block = 0; first < elems; first += block_elems, ++block) {
            const std::size_t count = std::min(block_elems, elems - first);
            const std::uint32_t bits = largest(with_error(first, count), count);
            float scale = std::min(std::bit_cast<float>(bits) / levels_, largest_);
            if (scale < least) scale = 0;
            if (bits >= infinite) {
                is_finite = false;
                scale = std::numeric_limits<float>::quiet_NaN();
            }
            std::memcpy(to + block * sizeof scale, &scale, sizeof scale);
        }
        const std::uint8_t* scales = to;
        std::uint8_t* codes = to + sizeof(float) * blocks(elems);
        for (std::size_t first = 0; first < elems; first += block_elems) {
            const std::size_t count = std::min(block_elems, elems - first);
            float scale;
            std::memcpy(&scale, scales + first / block_elems * sizeof scale, sizeof scale);
            const float* whole = with_error(first, count);
            std::uint8_t* own = halves_ ? wide : codes + first;
            if (std::isnan(scale)) {
                std::fill_n(own, count, static_cast<std::uint8_t>(levels_));
            } else {
                float* left = error && is_finite ? error + first : nullptr;
                round(whole, count, scale, levels_, own, left);
            }
            if (halves_) pack(wide, count, codes + first / 2);
        }
    }

    // Whether it is a code, of as many bytes as `size` says.
    bool decode(const std::uint8_t* from, std::size_t elems, float* to) const {
        const std::uint8_t* codes = from + sizeof(float) * blocks(elems);
        std::uint8_t wide[block_elems], most = 0;
        if (halves_ && elems % 2 && codes[elems / 2] >> 4) return false;
        for (std::size_t first = 0; first < elems; first += block_elems) {
            const std::size_t count = std::min(block_elems, elems - first);
            float scale;
            std::memcpy(&scale, from + first / block_elems * sizeof scale, sizeof scale);
            if (scale < 0 || scale > largest_) return false;
            if (halves_) unpack(codes + first / 2, count, wide);
            const std::uint8_t* own = halves_ ? wide : codes + first;
            most = std::max(most, expand(own, count, scale, levels_, to + first));
        }
        return most <= 2 * levels_;
    }

    static constexpr std::size_t block_elems = 128;

  private:
    static constexpr float least = 0x1p-100f;  // dividing by smaller ones would lose bits
    static constexpr std::uint32_t infinite = 0x7f800000;

    static std::size_t blocks(std::size_t elems) { return (elems + block_elems - 1) / block_elems; }

    // The largest magnitude, as bits: in the order of magnitudes, and then what is no number.
    FOREPROP_CLONES static std::uint32_t largest(const float* from, std::size_t elems) {
        std::uint32_t most = 0;
        for (std::size_t i = 0; i < elems; ++i)
            most = std::max(most, std::bit_cast<std::uint32_t>(from[i]) & 0x7fffffff);
        return most;
    }

    // A summand rounds: from 2**23 to 2**24 there are the whole numbers only.
    FOREPROP_CLONES static void round(const float* from, std::size_t elems, float scale,
                                      float levels, std::uint8_t* __restrict codes, float* left) {
        constexpr float rounding = 1.5f * (1 << 23);
        const float divisor = scale > 0 ? scale : 1.0f, most = 2 * levels;
        float numbers[block_elems];
        for (std::size_t i = 0; i < elems; ++i) {
            const float rounded = from[i] / divisor + rounding - (rounding - levels);
            numbers[i] = std::min(std::max(rounded, 0.0f), most);
        }
        for (std::size_t i = 0; i < elems; ++i)
            codes[i] = static_cast<std::uint8_t>(static_cast<int>(numbers[i]));
        for (std::size_t i = 0; left && i < elems; ++i)
            left[i] = from[i] - (numbers[i] - levels) * scale;
    }

    // Returns the largest code.
    FOREPROP_CLONES static std::uint8_t expand(const std::uint8_t* codes, std::size_t elems,
                                               float scale, float levels, float* __restrict to) {
        std::uint8_t most = 0;
        for (std::size_t i = 0; i < elems; ++i) most = std::max(most, codes[i]);
        for (std::size_t i = 0; i < elems; ++i)
            to[i] = (static_cast<float>(codes[i]) - levels) * scale;
        return most;
    }

    // Two codes a byte, the first one lowest.
    static void pack(std::uint8_t* codes, std::size_t elems, std::uint8_t* to) {
        if (elems % 2) codes[elems] = 0;
        for (std::size_t i = 0; i < elems; i += 2)
            to[i / 2] = static_cast<std::uint8_t>(codes[i] | codes[i + 1] << 4);
    }
    static void unpack(const std::uint8_t* from, std::size_t elems, std::uint8_t* codes) {
        for (std::size_t i = 0; i < elems; ++i) codes[i] = from[i / 2] >> i % 2 * 4 & 0xf;
    }

    float levels_, largest_;
    bool halves_;
};

}  // namespace foreprop
