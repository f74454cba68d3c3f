// CRC32C (RFC 3385) at about the speed of memory: three streams of the processor's instruction at a
// time, for one alone waits three cycles for each word. Without that instruction, a table.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

namespace foreprop {

namespace crc_detail {

constexpr std::uint32_t polynomial = 0x82f63b78;  // reflected
constexpr std::size_t stream_bytes = 1024;        // of each of the three

using Table = std::array<std::uint32_t, 256>;

constexpr Table make_bytes() {
    Table table{};
    for (std::uint32_t value = 0; value < 256; ++value) {
        std::uint32_t crc = value;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? polynomial : 0);
        table[value] = crc;
    }
    return table;
}
constexpr Table bytes = make_bytes();

// What a register becomes when so many zeros follow. That is linear in its bits: so a table for each
// of its four bytes gives it.
struct Shift {
    std::array<Table, 4> of_byte{};

    constexpr explicit Shift(std::size_t zeros) {
        std::array<std::uint32_t, 32> of_bit{};
        for (int bit = 0; bit < 32; ++bit) {
            std::uint32_t crc = std::uint32_t{1} << bit;
            for (std::size_t n = 0; n < zeros; ++n) crc = (crc >> 8) ^ bytes[crc & 255];
            of_bit[bit] = crc;
        }
        for (int byte = 0; byte < 4; ++byte) {
            for (int value = 0; value < 256; ++value) {
                for (int bit = 0; bit < 8; ++bit)
                    if (value >> bit & 1) of_byte[byte][value] ^= of_bit[8 * byte + bit];
            }
        }
    }
    std::uint32_t operator()(std::uint32_t crc) const {
        return of_byte[0][crc & 255] ^ of_byte[1][crc >> 8 & 255] ^ of_byte[2][crc >> 16 & 255] ^
               of_byte[3][crc >> 24];
    }
};

inline std::uint32_t by_table(std::uint32_t crc, const std::uint8_t* data, std::size_t size) {
    for (; size; --size) crc = (crc >> 8) ^ bytes[(crc ^ *data++) & 255];
    return crc;
}

#if defined(__x86_64__) || defined(__aarch64__)
#if defined(__x86_64__)
#define FOREPROP_CRC_TARGET __attribute__((target("sse4.2")))
FOREPROP_CRC_TARGET inline std::uint32_t take(std::uint32_t crc, std::uint64_t word) {
    return static_cast<std::uint32_t>(_mm_crc32_u64(crc, word));
}
inline bool has_instruction() { return __builtin_cpu_supports("sse4.2"); }
#else
#define FOREPROP_CRC_TARGET __attribute__((target("+crc")))
FOREPROP_CRC_TARGET inline std::uint32_t take(std::uint32_t crc, std::uint64_t word) {
    return __crc32cd(crc, word);
}
inline bool has_instruction() { return getauxval(AT_HWCAP) & HWCAP_CRC32; }
#endif

inline std::uint64_t word_at(const std::uint8_t* data) {
    std::uint64_t word;
    std::memcpy(&word, data, sizeof word);
    return word;
}

FOREPROP_CRC_TARGET inline std::uint32_t by_instruction(std::uint32_t crc, const std::uint8_t* data,
                                                        std::size_t size) {
    static const Shift over(stream_bytes);
    for (; size >= 3 * stream_bytes; size -= 3 * stream_bytes, data += 3 * stream_bytes) {
        std::uint32_t second = 0, third = 0;
        for (std::size_t at = 0; at < stream_bytes; at += 8) {
            crc = take(crc, word_at(data + at));
            second = take(second, word_at(data + stream_bytes + at));
            third = take(third, word_at(data + 2 * stream_bytes + at));
        }
        crc = over(over(crc) ^ second) ^ third;
    }
    for (; size >= 8; size -= 8, data += 8) crc = take(crc, word_at(data));
    return by_table(crc, data, size);
}
#endif

}  // namespace crc_detail

// Of `data`, where that of the bytes before them is `before`; 0 at first.
inline std::uint32_t crc32c(const void* data, std::size_t size, std::uint32_t before = 0) {
    const auto* at = static_cast<const std::uint8_t*>(data);
#if defined(__x86_64__) || defined(__aarch64__)
    static const bool fast = crc_detail::has_instruction();
    if (fast) return ~crc_detail::by_instruction(~before, at, size);
#endif
    return ~crc_detail::by_table(~before, at, size);
}

}  // namespace foreprop
