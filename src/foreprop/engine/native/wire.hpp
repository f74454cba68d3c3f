// `core.wire`: headers, their checks, and frames out of any split of the incoming bytes.
//
// No length that came from a peer is used before `Destination` has agreed to it. Any sequence of
// bytes either gives frames or throws `ProtocolError`; after damage to a payload the next frame can
// be read, after anything else nothing can.
#pragma once

#include <algorithm>
#include <cstdio>
#include <functional>
#include <optional>

#include "crc32c.hpp"
#include "frames.hpp"

namespace foreprop {

constexpr std::size_t header_bytes = 36;
constexpr std::size_t layout_bytes = 28;   // what stands before the checks
constexpr std::uint16_t magic = 0xF0E9;
constexpr std::uint8_t protocol_version = 3;

struct Header {
    int kind;
    std::uint16_t flags;
    std::uint16_t rank;
    Step step;
    std::uint32_t slice;
    std::int32_t priority;
    std::uint32_t payload_bytes;
};

namespace wire_detail {

template <class Int>
void put(std::uint8_t*& at, Int value) {
    for (int byte = sizeof(Int) - 1; byte >= 0; --byte)
        *at++ = static_cast<std::uint8_t>(static_cast<std::uint64_t>(value) >> (8 * byte));
}
template <class Int>
Int get(const std::uint8_t*& at) {
    std::uint64_t value = 0;
    for (std::size_t byte = 0; byte < sizeof(Int); ++byte) value = value << 8 | *at++;
    return static_cast<Int>(value);
}

}  // namespace wire_detail

// Writes a whole header. Where frames are not checked (an encrypted connection), its checks are 0.
inline void encode_header(const Header& header, const void* payload, bool checked,
                          std::uint8_t* out) {
    using wire_detail::put;
    std::uint8_t* at = out;
    put(at, magic);
    put(at, protocol_version);
    put(at, static_cast<std::uint8_t>(header.kind));
    put(at, header.flags);
    put(at, header.rank);
    put(at, static_cast<std::uint64_t>(header.step));
    put(at, header.slice);
    put(at, header.priority);
    put(at, header.payload_bytes);
    const bool has_payload = checked && header.payload_bytes;
    put(at, has_payload ? crc32c(payload, header.payload_bytes) : std::uint32_t{0});
    put(at, checked ? crc32c(out, layout_bytes + 4) : std::uint32_t{0});
}

inline std::string hexadecimal(std::uint32_t number, int digits) {
    char text[16];
    std::snprintf(text, sizeof text, "0x%0*x", digits, number);
    return text;
}

inline std::string damage(const std::string& what, std::uint32_t told, std::uint32_t found) {
    return what + " has come damaged: its CRC32C is " + hexadecimal(found, 8) + ", and was " +
           hexadecimal(told, 8) +
           " when it was sent. Look at memory, network cards and cables of both hosts";
}

// `known`: bit k says that kind k is one.
inline Header decode_header(const std::uint8_t* data, std::uint64_t known) {
    using wire_detail::get;
    const std::uint8_t* at = data;
    if (const auto found = get<std::uint16_t>(at); found != magic) {
        throw ProtocolError(ProtocolError::remote, "not a foreprop peer: magic is " +
                                                       hexadecimal(found, 4) + ", not " +
                                                       hexadecimal(magic, 4));
    }
    if (const auto version = get<std::uint8_t>(at); version != protocol_version) {
        throw ProtocolError(ProtocolError::remote,
                            "the peer speaks protocol version " + text_of(version) +
                                ", this process " + text_of(protocol_version) +
                                ": install the same foreprop on all machines");
    }
    Header header{};
    header.kind = get<std::uint8_t>(at);
    if (header.kind > 63 || !(known >> header.kind & 1)) {
        throw ProtocolError(ProtocolError::remote, "unknown frame kind " + text_of(header.kind));
    }
    header.flags = get<std::uint16_t>(at);
    header.rank = get<std::uint16_t>(at);
    header.step = static_cast<Step>(get<std::uint64_t>(at));
    header.slice = get<std::uint32_t>(at);
    header.priority = get<std::int32_t>(at);
    header.payload_bytes = get<std::uint32_t>(at);
    return header;
}

inline void check_header(const std::uint8_t* data) {
    const std::uint8_t* at = data + layout_bytes + 4;
    const auto told = wire_detail::get<std::uint32_t>(at);
    const std::uint32_t found = crc32c(data, layout_bytes + 4);
    if (found != told)
        throw ProtocolError(ProtocolError::remote, damage("a frame's header", told, found));
}

// Assembles frames without copying payloads: fill `wanted`, then say how much with `advance`.
// A frame for which the destination has no memory is somebody else's: its payload passes, as it
// comes, and is neither kept nor checked here.
class FrameReader {
  public:
    struct Room {
        std::uint8_t* data;
        std::size_t size;
    };
    struct Arrived {
        Header header;
        bool damaged;  // what came is not what was sent; the checks say so
        std::uint32_t told, found;
    };
    // Gives the memory of exactly the header's `payload_bytes`, null to let it pass, or throws.
    // `raw` are the header's bytes as they came.
    using Destination = std::function<std::uint8_t*(const Header&, const std::uint8_t* raw)>;
    // Told of bytes of a payload that passes, and how many of it are still to come.
    using Pass = std::function<void(const std::uint8_t*, std::size_t, std::size_t left)>;

    FrameReader(Destination destination, std::uint64_t known, bool checked, Pass pass = nullptr)
        : destination_(std::move(destination)),
          known_(known),
          checked_(checked),
          pass_(std::move(pass)) {}

    Room wanted() {
        if (passing_) {
            scratch_.resize(scratch_bytes);
            return {scratch_.data(), std::min<std::size_t>(passing_, scratch_bytes)};
        }
        return {whole_.data + got_, whole_.size - got_};
    }

    // Whether a connection that ends now would cut a frame in two.
    bool mid_frame() const { return got_ || in_payload_ || passing_; }

    std::optional<Arrived> advance(std::size_t received) {
        if (passing_) {
            passing_ -= received;
            pass_(scratch_.data(), received, passing_);
            return std::nullopt;
        }
        got_ += received;
        if (got_ < whole_.size) return std::nullopt;
        got_ = 0;
        if (in_payload_) {
            const Room payload = std::exchange(whole_, {data_, header_bytes});
            in_payload_ = false;
            if (!checked_) return Arrived{header_, false, 0, 0};
            const std::uint8_t* at = data_ + layout_bytes;
            const auto told = wire_detail::get<std::uint32_t>(at);
            const std::uint32_t found = crc32c(payload.data, payload.size);
            return Arrived{header_, told != found, told, found};
        }
        // Another program's or version's is said first, not its check.
        if (!std::exchange(begun_, true)) decode_header(data_, known_);
        if (checked_) check_header(data_);
        header_ = decode_header(data_, known_);
        std::uint8_t* room = destination_(header_, data_);
        if (!room) {
            passing_ = header_.payload_bytes;
            return std::nullopt;
        }
        if (!header_.payload_bytes) return Arrived{header_, false, 0, 0};
        whole_ = {room, header_.payload_bytes};
        in_payload_ = true;
        return std::nullopt;
    }

  private:
    static constexpr std::size_t scratch_bytes = 65'536;

    Destination destination_;
    std::uint64_t known_;
    bool checked_;
    Pass pass_;
    std::size_t passing_ = 0;  // bytes of a payload that have still to pass
    std::vector<std::uint8_t> scratch_;
    bool begun_ = false;
    bool in_payload_ = false;
    std::uint8_t data_[header_bytes];
    Header header_{};
    Room whole_{data_, header_bytes};
    std::size_t got_ = 0;
};

}  // namespace foreprop
