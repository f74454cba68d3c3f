// What the programs beside this file share: settings of small worlds, frames, and sockets.
#pragma once

#include <sys/socket.h>

#include <cstdio>
#include <cstdlib>
#include <random>

#include "plane.hpp"

namespace testing {

using namespace foreprop;
using Bytes = std::vector<std::uint8_t>;

constexpr int barrier = 13;  // a kind that the plane does not know, as all but pushes and replies
constexpr std::uint64_t known = (1ull << 46) - 2;
constexpr std::size_t first_elems = 6;
constexpr int sizes = 5;

// Slices of 24 bytes to 300 kB: small ones that leave together, and those that do not fit a socket.
// Each server has one of each size and type; a parameter has one slice at every server. That of
// `cast` is in float32, and in half precision on the wire; that of `coded` has a codec.
constexpr int cast = 2, coded = 4;
inline PlaneSetting setting_of(int rank, int ranks, Reply reply = Reply::broadcast,
                               Codec codec = Codec::bf16) {
    PlaneSetting made{};
    made.rank = rank;
    made.workers = made.started = ranks;
    made.parameters = sizes;
    made.order = Order::priority;
    made.reply = reply;
    made.window_servers = ranks;
    made.window_bytes = 200'000;
    made.servers = {{rank, Turns{}}};
    made.known = known;
    made.checked = true;
    made.unsent_bytes = 131'072;
    std::size_t elems = first_elems;
    const Dtype types[] = {Dtype::float32, Dtype::float64, Dtype::bfloat16, Dtype::float16};
    for (int parameter = 0; parameter < sizes; ++parameter, elems *= 11) {
        made.names.push_back("parameter" + text_of(parameter));
        const Dtype dtype = types[parameter % 4];
        const std::size_t size = elems * itemsize(dtype);
        const std::size_t whole = parameter == cast ? elems * sizeof(float) : size;
        for (int server = 0; server < ranks; ++server) {
            const std::size_t start = static_cast<std::size_t>(server) * whole;
            const Codec own = parameter == coded ? codec : Codec::none;
            made.slices.push_back(
                {parameter, server, start, whole, size, dtype, true, own, {{0, size}}});
            if (reply == Reply::broadcast)
                made.window_sizes_bytes.push_back(static_cast<std::int64_t>(size));
        }
    }
    return made;
}
inline std::size_t bytes_of(const PlaneSetting& setting, int parameter) {
    std::size_t size = 0;
    for (const Piece& each : setting.slices)
        if (each.parameter == parameter) size = std::max(size, each.start_bytes + each.whole_bytes);
    return size;
}
inline void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "not so: %s\n", what);
    std::abort();
}

// What is left of a gradient where it has been in half precision, or a code.
inline Bytes after_travel(const PlaneSetting& setting, int parameter, Bytes gradient) {
    for (const Piece& each : setting.slices) {
        const bool is_coded = each.codec != Codec::none;
        if (each.parameter != parameter || !(each.is_cast() || is_coded)) continue;
        Bytes narrow(each.usual_bytes());
        std::uint8_t* own = gradient.data() + each.start_bytes;
        auto* values = reinterpret_cast<float*>(own);
        if (is_coded) {
            encode(each.codec, values, nullptr, each.elems(), narrow.data());
            require(decode(each.codec, narrow.data(), each.elems(), values), "a code is one");
        } else {
            each.narrow(own, narrow.data());
            each.widen(narrow.data(), own);
        }
    }
    return gradient;
}

inline Bytes frame_of(const Header& header, const Bytes& payload) {
    Bytes whole(header_bytes);
    encode_header(header, payload.data(), true, whole.data());
    whole.insert(whole.end(), payload.begin(), payload.end());
    return whole;
}

struct Pair {
    int ends[2];
    Pair() {
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends)) std::abort();
    }
};

}  // namespace testing
