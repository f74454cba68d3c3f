// The plane's receiving thread: frames straight to where they belong, and sums of what is closed.
#pragma once

#include "plane.hpp"

namespace foreprop {

inline void Plane::receive_all() {
    std::vector<epoll_event> events(64);
    while (!stopping_) {
        take_own();
        receiver_sleeps_ = true;
        bool more;
        {
            std::lock_guard lock(posted_mutex_);
            more = !here_.empty();
        }
        for (auto& [_, at] : servers_) more |= at->goes_on;
        const int count =
            wait_for(receiving_, events, more, first(arriving_, &Connection::here_ns));
        receiver_sleeps_ = false;
        for (const Shared& each : due(arriving_, &Connection::here_ns)) arrive(*each);
        for (int n = 0; n < count; ++n) {
            const Id id = events[n].data.u64;
            if (!id) {
                slept(wake_receiver_);
            } else if (const Shared connection = find(id)) {
                drain(*connection);
            }
        }
    }
}

// Frames between this process's worker and a server in it: no socket, and no copy of a gradient.
inline void Plane::take_own() {
    for (auto& [_, at] : servers_) {
        if (!at->goes_on.exchange(false)) continue;
        const Shared own = find(server, at->index, setting_.rank);
        try {
            std::unique_lock lock(at->mutex);
            Instructions told = at->machine.go_on();
            post(server, at->index, told);
            carry_out(own.get(), *at, told, lock);
        } catch (const ProtocolError& error) {
            if (own) refuse(*own, error);
        }
    }
    for (;;) {
        std::deque<Posted> taken;
        {
            std::lock_guard lock(posted_mutex_);
            taken.swap(here_);
        }
        if (taken.empty()) return;
        for (const auto& [role, own, frame] : taken) {
            const int index = role == worker ? frame.peer : own;
            Server& at = *servers_.at(index);
            {
                std::lock_guard lock(role == worker ? worker_mutex_ : at.mutex);
                post(role, own,
                     role == worker ? worker_.frame_sent(frame.peer)
                                    : at.machine.frame_sent(frame.peer));
                if (is(frame, Kind::push) && frame.token == no_token) {
                    ++pushes_;
                    pushed_bytes_ += static_cast<std::int64_t>(bytes_of(frame, no_gradient));
                    if (!(frame.flags & no_gradient)) raw_pushed_bytes_ += raw_bytes_of(frame);
                }
            }
            const Shared connection =
                role == worker ? find(server, index, setting_.rank) : find(worker, -1, index);
            if (frame.token == no_token) note_own(role, index, frame);
            const std::int64_t now = (role == worker ? at.spans : spans_).now();
            try {
                if (frame.token != no_token && role == server) {
                    if (connection) answer_own(index, *connection, frame);
                } else if (frame.token != no_token) {
                    pass_own(index, connection.get(), frame);
                } else if (role == worker) {
                    if (is(frame, Kind::push)) push_own(at, frame);
                    came_to_server(connection.get(), at, setting_.rank, frame, now);
                } else {  // the average is there: see `combine`
                    came_to_worker(index, frame, bytes_of(frame, unchanged), now);
                }
            } catch (const ProtocolError& error) {
                if (connection) refuse(*connection, error);
            }
            if (role == worker) ring_if_idle();
        }
    }
}

// Its gradient as others would have it: what lies where it was computed is read as the sum is made.
inline void Plane::push_own(Server& at, const Frame& push) {
    const Piece& piece = setting_.slices[push.slice];
    if (piece.codec == Codec::none) return;
    const Buffer code = leaving_gradient(piece, push);
    at.rooms[push.slice][static_cast<std::size_t>(setting_.rank)] =
        code ? decoded(piece, push, code) : nullptr;
}

// Behind the pushes before it; but by the socket as long as the server does not know us.
inline void Plane::pass_own(int index, Connection* knows, const Frame& frame) {
    const Buffer whole = message_of(frame);
    if (knows) {
        note_passing(*servers_.at(index), setting_.rank, frame.kind, frame.flags);
        knows->insert(whole->data(), whole->size());
    } else {
        post_whole(find(worker, -1, index), whole);
    }
}

// What Python says to this rank as a server: a slice's values, or a frame that passes.
inline void Plane::answer_own(int index, Connection& connection, const Frame& frame) {
    const Buffer whole = message_of(frame);
    if (!is(frame, Kind::reply)) {
        connection.insert(whole->data(), whole->size());
        return;
    }
    const std::size_t size = whole->size() - header_bytes;
    {
        std::lock_guard lock(worker_mutex_);
        land(index, frame, whole->data() + header_bytes, size);
    }
    came_to_worker(index, frame, size, spans_.now());
}

// A reply to where it belongs, if it is awaited. Under the worker's lock where servers may be lost:
// what has been claimed stays as it is.
inline void Plane::land(int from, const Frame& reply, const std::uint8_t* data, std::size_t size) {
    if (!worker_.awaits(reply.slice, reply.step) || worker_.owner_of(reply.slice) != from) return;
    const Piece& piece = setting_.slices[reply.slice];
    std::uint8_t* result = results_[piece.parameter] + piece.start_bytes;
    if (size == piece.whole_bytes) {
        std::memcpy(result, data, size);
    } else if (size == piece.size_bytes) {
        piece.widen(data, result);
    }
}

inline void Plane::note_own(Role role, int index, const Frame& frame) {
    Spans& spans = spans_on(role, index);
    if (!spans.noted()) return;
    Outgoing gone{.frame = frame, .started_ns = spans.now()};
    gone.size = bytes_of(frame, role == worker ? no_gradient : unchanged);
    gone.queued_ns = role == worker
                         ? queued_ns_[setting_.slices[frame.slice].parameter][frame.step & 1]
                         : made_ns_[frame.slice];
    note_sent(role, index, gone);
}

inline std::size_t Plane::bytes_of(const Frame& frame, Flags empty) const {
    return frame.flags & empty ? 0 : setting_.slices[frame.slice].usual_bytes();
}

inline std::int64_t Plane::raw_bytes_of(const Frame& frame) const {
    return static_cast<std::int64_t>(setting_.slices[frame.slice].size_bytes);
}

inline void Plane::drain(Connection& connection) {
    try {
        for (int round = 0; round < 64; ++round)
            if (!drain_some(connection)) return;
    } catch (const ProtocolError& error) {
        refuse(connection, error);
    }
}

// Whether there may be more.
inline bool Plane::drain_some(Connection& connection) {
    Connection& c = connection;
    if (c.here_ns) return false;
    if (c.begin == c.stop) {
        const auto room = c.reader.wanted();
        const bool direct = room.size >= direct_bytes;
        std::size_t most = direct ? room.size : Connection::buffer_bytes;
        if (c.is_paced) most = std::min(most, Link::chunk_bytes);
        const ssize_t got = recv(c.fd, direct ? room.data : c.buffer.data(), most, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR) return true;
        if (got < 0 && errno == EAGAIN) return false;
        if (got <= 0) {
            epoll_ctl(receiving_, EPOLL_CTL_DEL, c.fd, nullptr);
            finish(
                c,
                {.kind = got ? End::broken : End::closed, .number = got ? errno : 0, .text = {}});
            return false;
        }
        c.came = static_cast<std::size_t>(got);
        if (c.is_paced && (c.here_ns = ingress_->occupy(c.came)) > now_ns()) {
            watch(EPOLL_CTL_MOD, receiving_, c.fd, 0, c.id);
            arriving_.push_back(c.shared_from_this());
            return false;
        }
        c.here_ns = 0;
        return take_in(c, direct);
    }
    return take_in(c, false);
}

// What has come, straight to its place or into the buffer.
inline bool Plane::take_in(Connection& c, bool direct) {
    const std::size_t came = std::exchange(c.came, 0);
    if (direct) {
        took(c, came);
        return !pauses(c);
    }
    if (came) {
        c.begin = 0;
        c.stop = came;
    }
    while (c.begin < c.stop) {
        const auto room = c.reader.wanted();
        const std::size_t some = std::min(room.size, c.stop - c.begin);
        std::memcpy(room.data, c.buffer.data() + c.begin, some);
        c.begin += some;
        took(c, some);
    }
    return !pauses(c);
}

// Python has to read first what passes.
inline bool Plane::pauses(Connection& connection) {
    std::lock_guard lock(connection.mutex);
    if (connection.is_full) watch(EPOLL_CTL_MOD, receiving_, connection.fd, 0, connection.id);
    return connection.is_full;
}

// It has passed the emulated link.
inline void Plane::arrive(Connection& connection) {
    try {
        take_in(connection, connection.reader.wanted().size >= direct_bytes);
    } catch (const ProtocolError& error) {
        refuse(connection, error);
        return;
    }
    std::lock_guard lock(connection.mutex);
    if (!connection.is_full)
        watch(EPOLL_CTL_MOD, receiving_, connection.fd, EPOLLIN, connection.id);
}

inline void Plane::took(Connection& connection, std::size_t bytes) {
    const auto frame = connection.reader.advance(bytes);
    if (!frame) return;
    const Header& h = frame->header;
    const int peer = connection.peer;
    const Frame came{peer,       h.kind,  h.step,  static_cast<int>(h.slice),
                     h.priority, h.flags, no_token};
    if (frame->damaged) {
        ask_again(connection, *frame);
    } else if (connection.role == worker) {
        const Buffer room = std::exchange(connection.room, nullptr);
        if (room && setting_.elastic) {
            std::lock_guard lock(worker_mutex_);
            land(peer, came, room->data(), room->size());
        } else if (room) {
            const Piece& piece = setting_.slices[came.slice];
            std::uint8_t* result = results_[piece.parameter] + piece.start_bytes;
            if (piece.codec != Codec::none) {
                decode_to(result, piece, came, room);
            } else {
                piece.widen(room->data(), result);
            }
        }
        came_to_worker(peer, came, h.payload_bytes, connection.began_ns);
    } else {
        if (connection.room) {  // else nobody has looked whether there is such a slice
            const Piece& piece = setting_.slices[came.slice];
            if (connection.room->size() != piece.size_bytes)
                connection.room = decoded(piece, came, connection.room);
        }
        Server& at = *servers_.at(connection.index);
        came_to_server(&connection, at, peer, came, connection.began_ns);
    }
}

inline void Plane::came_to_worker(int server, const Frame& frame, std::size_t bytes,
                                  std::int64_t began_ns) {
    if (is(frame, Kind::notify)) {
        worker_heard(
            [&] { return worker_.notify_arrived(frame.slice, frame.step, server, frame.flags); });
    } else {
        reply_came(server, frame, bytes, began_ns);
    }
}

inline void Plane::came_to_server(Connection* connection, Server& at, int rank, const Frame& frame,
                                  std::int64_t began_ns) {
    if (is(frame, Kind::pull)) {
        // it follows its push at once: it waits for one that is to come again
        if (connection) {
            const auto again = connection->asked.find(frame.slice);
            if (again != connection->asked.end() && !again->second) {
                again->second = frame;
                return;
            }
        }
        std::lock_guard lock(at.mutex);
        post(server, at.index,
             at.machine.pull_arrived(rank, frame.slice, frame.step, frame.priority));
        return;
    }
    push_came(connection, at, rank, frame, began_ns);
    if (!connection || connection->asked.empty()) return;
    const auto again = connection->asked.extract(frame.slice);
    if (again && again.mapped()) came_to_server(connection, at, rank, *again.mapped(), began_ns);
}

// `engine.connection.Connection`: a gradient may have been added to after its checksum was made.
inline void Plane::ask_again(Connection& connection, const FrameReader::Arrived& came) {
    const Header& h = came.header;
    if (connection.role == worker || !(h.flags & gradient) || ++connection.damaged > most_damaged) {
        const char* kind = connection.role == worker ? "REPLY" : "PUSH";
        throw ProtocolError(
            ProtocolError::remote,
            damage(std::string(kind) + " of slice " + text_of(h.slice) + ", step " +
                       text_of(h.step) + " (" + text_of(h.payload_bytes) + " bytes)",
                   came.told, came.found));
    }
    auto message = std::make_shared<std::vector<std::uint8_t>>(header_bytes + 18);
    std::uint8_t* at = message->data() + header_bytes;
    wire_detail::put(at, came.told);
    wire_detail::put(at, came.found);
    wire_detail::put(at, h.flags);
    wire_detail::put(at, h.priority);
    wire_detail::put(at, h.payload_bytes);
    const Frame frame{
        connection.peer, static_cast<int>(Kind::damaged), h.step, static_cast<int>(h.slice), -1, 0,
        no_token};
    seal_whole(sender_on(connection), frame, *message);
    connection.asked[frame.slice] = std::nullopt;
    post_whole(find(connection.id), message);
}

// Every length is checked against what is awaited, before a byte of the payload is read.
inline std::uint8_t* Plane::room_for(Connection& connection, const Header& header,
                                     const std::uint8_t* raw) {
    connection.room = nullptr;  // of a frame that was damaged
    const bool replies = connection.role == worker;
    const Kind kind = replies ? Kind::reply : Kind::push;
    const bool is_bare = header.kind == static_cast<int>(replies ? Kind::notify : Kind::pull);
    if (!(header.kind == static_cast<int>(kind) || is_bare) || !connection.carries) {
        if (!replies && connection.carries)
            note_passing(*servers_.at(connection.index), connection.peer, header.kind,
                         header.flags);
        connection.pass(raw, header_bytes, header.payload_bytes);
        return nullptr;
    }
    connection.began_ns = spans_on(connection.role, connection.index).now();
    const int peer = connection.peer;
    if (header.rank != peer) {
        const std::string whose = replies ? "server " : "rank ";
        throw ProtocolError(ProtocolError::remote, whose + text_of(peer) + " sent a frame of " +
                                                       whose + text_of(header.rank));
    }
    if (!replies && peer == setting_.rank) {
        throw ProtocolError(ProtocolError::remote,
                            "a push of this process's own rank has come from a socket");
    }
    const auto slice = static_cast<std::size_t>(header.slice);
    std::uint8_t* result = nullptr;
    if (is_bare) {  // the machines check the rest
        if (header.payload_bytes) {
            throw ProtocolError(ProtocolError::remote,
                                std::string(replies ? "NOTIFY" : "PULL") + " of slice " +
                                    text_of(header.slice) + " carries " +
                                    text_of(header.payload_bytes) + " bytes, not 0");
        }
        return nowhere_;
    }
    if (replies) {
        std::lock_guard lock(worker_mutex_);
        const bool awaited = worker_.awaits(static_cast<int>(header.slice), header.step);
        const std::string what =
            "server " + text_of(peer) + " sent a reply for slice " + text_of(header.slice);
        if (slice >= setting_.slices.size() || !awaited) {
            throw ProtocolError(ProtocolError::remote,
                                what + ", step " + text_of(header.step) + ", which is not awaited");
        }
        const Piece& piece = setting_.slices[slice];
        if (const int owner = worker_.owner_of(static_cast<int>(slice)); owner != peer) {
            throw ProtocolError(ProtocolError::remote,
                                what + ", which belongs to server " + text_of(owner));
        }
        result = results_[piece.parameter] + piece.start_bytes;
    } else if (slice >= setting_.slices.size() || !owns(connection.index, slice)) {
        throw ProtocolError(ProtocolError::remote, "slice " + text_of(header.slice) +
                                                       " does not belong to server " +
                                                       text_of(connection.index));
    }
    const Piece& piece = setting_.slices[slice];
    const bool is_empty = header.flags & (replies ? unchanged : no_gradient);
    const bool is_start = replies && !header.step;  // values in full
    const std::size_t expected = is_empty ? 0 : is_start ? piece.whole_bytes : piece.size_bytes;
    // an average that another worker gives, as that has it
    const bool is_given =
        replies && setting_.elastic && header.payload_bytes == piece.whole_bytes && !is_empty;
    const bool is_coded =
        !is_empty && !is_start && piece.codec != Codec::none &&
        header.payload_bytes == piece.usual_bytes();
    if (header.payload_bytes != expected && !is_coded && !is_given) {
        throw ProtocolError(ProtocolError::remote, std::string(replies ? "REPLY" : "PUSH") +
                                                       " of slice " + text_of(header.slice) +
                                                       " carries " + text_of(header.payload_bytes) +
                                                       " bytes, not " +
                                                       text_of(static_cast<Step>(expected)));
    }
    const bool lands_at_once = !setting_.elastic && (is_start || !(piece.is_cast() || is_coded));
    if (replies && (is_empty || lands_at_once)) return result;
    if (is_empty) return nowhere_;
    connection.room = buffers_.take(header.payload_bytes);
    return connection.room->data();
}

inline void Plane::push_came(Connection* connection, Server& at, int rank, const Frame& push,
                             std::int64_t began_ns) {
    const auto [peer, kind, step, slice, priority, flags, token] = push;
    std::unique_lock lock(at.mutex);
    if (setting_.elastic && !at.machine.is_here(rank)) {  // it has been dropped
        if (connection) connection->room = nullptr;
        return;
    }
    auto& last = at.last[static_cast<std::size_t>(rank)];
    if (at.tells_begins && step > last.second && connection)
        tell_begin(*connection, slice, step, priority, flags);
    Instructions told = at.machine.push_arrived(rank, slice, step, priority, flags);
    last = {slice, step};
    note_round(at, rank, push);
    if (rank != setting_.rank && !(flags & no_gradient))
        at.rooms[slice][static_cast<std::size_t>(rank)] = std::move(connection->room);
    at.spans.note({Stage::push_received, slice, step, priority, rank, bytes_of(push, no_gradient),
                   began_ns, at.spans.now()});
    post(server, at.index, told);
    carry_out(connection, at, told, lock);
}

// Closed rounds are added up, without the lock, and answered; failures end the `connection`.
inline void Plane::carry_out(Connection* connection, Server& at, Instructions& told,
                             std::unique_lock<std::mutex>& lock) {
    for (std::size_t n = 0; n < told.size(); ++n) {  // an update may be followed by another
        const Instruction each = told[n];
        if (each.what == Instruction::fail && connection) {
            finish(*connection, {.kind = End::failed,
                                 .number = each.blamed,
                                 .step = each.frame.step,
                                 .text = each.reason});
        }
        if (each.what != Instruction::update) continue;
        if (setting_.elastic) {
            if (auto ranks = at.machine.changed_set(each.frame.slice)) {
                at.counted_sets.push_back({each.frame.slice, each.frame.step, std::move(*ranks)});
                if (connection)  // for a log that is to outlive this process
                    tell_begin(*connection, each.frame.slice, each.frame.step, 0, 0);
            }
        }
        lock.unlock();
        const std::int64_t started_ns = at.spans.now();
        Buffer sum = combine(at, each);
        if (each.measured) measure(at, each, sum);
        const std::int64_t made_ns = at.spans.now();
        lock.lock();
        made_ns_[each.frame.slice] = made_ns;
        at.spans.note(
            {Stage::updated, each.frame.slice, each.frame.step, 0, -1, 0, started_ns, made_ns});
        if (sum) {
            Sum& last = sums_[each.frame.slice];
            if (!last.owed.empty()) {
                throw ProtocolError(ProtocolError::remote,
                                    "slice " + text_of(each.frame.slice) +
                                        " was pushed again before its average had been sent");
            }
            last.data = std::move(sum);
            last.owed = at.machine.answered(each.frame.slice);
            std::erase(last.owed, setting_.rank);
        }
        const Instructions more = at.machine.slice_updated(each.measured);
        for (const Instruction& next : more)
            if (next.what == Instruction::squares) send_squares(at, next.frame.step);
        post(server, at.index, more);
        told.insert(told.end(), more.begin(), more.end());
    }
}

inline void Plane::tell_begin(Connection& connection, int slice, Step step, int priority,
                              Flags flags) {
    std::uint8_t header[header_bytes];
    const int peer = connection.peer;
    const Frame begins{peer,     static_cast<int>(Kind::push), step,    slice,
                       priority, flags | no_gradient,          no_token};
    seal(peer, begins, nullptr, 0, header);
    connection.insert(header, header_bytes);
}

// The receiving thread alone has the rooms; null if no rank had a gradient, or others are none.
inline Buffer Plane::combine(Server& at, const Instruction& update) {
    const int slice = update.frame.slice;
    if (update.ranks.empty()) return nullptr;
    if (!update.average) {
        throw ProtocolError(ProtocolError::remote,
                            "slice " + text_of(slice) + " is to be updated, which the workers do");
    }
    const Piece& piece = setting_.slices[slice];
    std::vector<const std::uint8_t*> parts;
    for (int rank : update.ranks) {
        Buffer& room = at.rooms[slice][static_cast<std::size_t>(rank)];
        if (rank == setting_.rank && piece.is_cast()) room = leaving_gradient(piece, update.frame);
        parts.push_back(room ? room->data() : gradient_of(piece));
        if (setting_.checks_finite) check_finite(piece, parts.back(), rank, update.frame.step);
    }
    if (at.watches && parts.size() > 1) compare(at, slice, parts);
    // this rank has pushed, too, and does not look there before its answer comes
    std::uint8_t* own = is_answered(at, slice) ? results_[piece.parameter] + piece.start_bytes
                                               : nullptr;
    const bool is_coded = piece.codec != Codec::none;
    const bool apart =
        setting_.workers > 1 || setting_.elastic || piece.is_cast() || is_coded;
    Buffer sum = apart ? buffers_.take(piece.size_bytes) : nullptr;
    std::uint8_t* total = sum ? sum->data() : std::exchange(own, nullptr);
    std::uint8_t* later = piece.is_cast() || is_coded ? std::exchange(own, nullptr) : nullptr;
    const Reduction reduction{piece.mean, update.counted ? update.counted : setting_.workers};
    const std::size_t size = piece.size_bytes;
    of_type(piece.dtype,
            [&]<class Each>(Each*) { reduce_as<Each>(total, own, parts, size, reduction); });
    if (is_coded) {
        sum = coded_average(at, update, sum, later);
    } else if (later) {
        piece.widen(total, later);
    }
    for (Buffer& room : at.rooms[slice]) room.reset();
    return sum;
}

// Whether this rank is to have the average: in an elastic session it may have been dropped.
inline bool Plane::is_answered(Server& at, int slice) const {
    if (!setting_.elastic) return true;
    std::lock_guard lock(at.mutex);
    const auto ranks = at.machine.answered(slice);
    return std::find(ranks.begin(), ranks.end(), setting_.rank) != ranks.end();
}

inline bool Plane::owns(int index, std::size_t slice) {
    if (!setting_.elastic) return setting_.slices[slice].server == index;
    Server& at = *servers_.at(index);
    std::lock_guard lock(at.mutex);
    return at.machine.owns(static_cast<int>(slice));
}

// `averagecodes.AverageCodes`: the first round after a code tells whether that one has counted.
inline void Plane::note_round(Server& at, int rank, const Frame& push) const {
    if (setting_.slices[push.slice].codec == Codec::none) return;
    if (rank == 0) at.needed = at.announced;
    auto& noted = at.rounds[push.slice];
    if (noted.empty() || noted.back().round != round_of(push)) {
        if (noted.size() == 2) noted.pop_back();
        noted.push_back({round_of(push), false});
    }
    noted.back().builds_on |= (push.flags & builds_on) != 0;
}

// What is answered, and, for this rank, what others decode from that.
inline Buffer Plane::coded_average(Server& at, const Instruction& update, const Buffer& sum,
                                   std::uint8_t* own) {
    const int slice = update.frame.slice;
    const Piece& piece = setting_.slices[slice];
    {
        std::unique_lock lock(at.told_mutex);
        while (at.told < at.needed && !stopping_) at.telling.wait_for(lock, most_told_wait);
    }
    SliceResidual& left_out = at.left_out[slice];
    auto& noted = at.rounds[slice];
    for (const auto& [round, builds] : noted)
        left_out.follow(piece.codec, piece.elems(), round, at.scales.at(round.step), builds);
    Buffer code = coded(left_out, piece, noted.back().round, sum->data());
    noted.clear();
    if (code) {
        decode_to(own, piece, update.frame, code);
    } else {
        std::copy_n(sum->data(), piece.size_bytes, own);
    }
    return code ? code : sum;
}

// Rank 0's numbers, among them the loss's scale, and residuals of a checkpoint are Python's to read.
// It tells of each (`tell_scale`, `put_residual`), and what follows on the wire waits for that.
inline void Plane::note_passing(Server& at, int rank, int kind, Flags flags) {
    const bool is_residual = kind == static_cast<int>(Kind::state) &&
                             (flags & averages_residual) == averages_residual;
    const bool is_one = is_residual || kind == static_cast<int>(Kind::hyperparameters);
    at.announced += rank == 0 && is_one;
}

// `params.finite`.
inline void Plane::check_finite(const Piece& piece, const std::uint8_t* part, int rank,
                                Step step) const {
    NotFinite found;
    of_type(piece.dtype, [&]<class Each>(Each*) {
        found = not_finite(reinterpret_cast<const Each*>(part), piece.size_bytes / sizeof(Each));
    });
    if (!found.elems) return;
    static constexpr const char* names[] = {"float32", "float64", "bfloat16", "float16"};
    const auto elems = static_cast<Step>(piece.size_bytes / itemsize(piece.dtype));
    throw ProtocolError(ProtocolError::training,
                        name_of(rank) + ": the gradient of " + setting_.names[piece.parameter] +
                            " is not finite in step " + text_of(step) + ": " +
                            text_of(found.elems) + " of " + text_of(elems) +
                            " elements looked at (" + names[static_cast<int>(piece.dtype)] +
                            ") are not, some " + (found.has_nan ? "NaN" : "infinite") +
                            " (check_finite)");
}

// What the squares of each parameter's average add up to, as workers get it.
inline void Plane::measure(Server& at, const Instruction& update, const Buffer& sum) const {
    const Piece& piece = setting_.slices[update.frame.slice];
    auto& sums = at.squares[update.frame.slice];
    sums.assign(piece.places.size(), {});
    if (update.ranks.empty()) return;
    const bool is_here = !sum || piece.codec != Codec::none;  // as workers have it
    const std::uint8_t* average =
        is_here ? results_[piece.parameter] + piece.start_bytes : sum->data();
    of_type(piece.dtype, [&]<class Each>(Each*) {
        for (std::size_t n = 0; n < sums.size(); ++n) {
            const auto [from, to] = piece.places[n];
            const auto* own = reinterpret_cast<const Each*>(average + from);
            sums[n] = square_sum(own, (to - from) / sizeof(Each));
        }
    });
}

// All ranks are told what all slices here add up to, before any average: see `core`'s machine.
inline void Plane::send_squares(Server& at, Step step) {
    auto whole = std::make_shared<std::vector<std::uint8_t>>(header_bytes);
    for (const auto& slice : at.squares) {
        for (const SquareSum& each : slice) {
            whole->resize(whole->size() + SquareSum::encoded_bytes);
            each.encode(&*whole->end() - SquareSum::encoded_bytes);
        }
    }
    const Frame told{-1, static_cast<int>(Kind::norm_part), step, 0, control_priority, 0, no_token};
    seal_whole(at.index, told, *whole);
    for (int rank = 0; rank < setting_.workers; ++rank) {
        if (rank != setting_.rank) {
            post_whole(find(server, at.index, rank), whole);
        } else if (const Shared own = find(worker, -1, at.index)) {
            own->insert(whole->data(), whole->size());
        }
    }
}

template <class Each>
void Plane::reduce_as(std::uint8_t* sum, std::uint8_t* own,
                      const std::vector<const std::uint8_t*>& bytes, std::size_t size,
                      const Reduction& reduction) {
    std::vector<const Each*> parts;
    for (const std::uint8_t* each : bytes) parts.push_back(reinterpret_cast<const Each*>(each));
    Each* total = reinterpret_cast<Each*>(sum);
    const std::size_t elems = size / sizeof(Each);
    if constexpr (std::is_floating_point_v<Each>) {
        reduce(total, parts, elems, reduction, reinterpret_cast<Each*>(own));
    } else {
        reduce_halves(total, parts, elems, reduction, reinterpret_cast<Each*>(own));
    }
}

// `engine.sums.SameBatch`. What all elements have in common tells nothing.
inline void Plane::compare(Server& at, int slice,
                           const std::vector<const std::uint8_t*>& parts) const {
    const Piece& piece = setting_.slices[slice];
    const std::size_t least = itemsize(piece.dtype);
    for (const auto& [from, to] : piece.places) {
        const std::uint8_t* own = parts[0] + from;
        const std::size_t size = to - from;
        if (size <= least || !std::memcmp(own, own + least, size - least)) continue;
        for (std::size_t other = 1; other < parts.size(); ++other) {
            if (std::memcmp(own, parts[other] + from, size)) {
                at.watches = false;
                at.same_batch = 0;
                return;
            }
        }
        at.same_batch = std::max(at.same_batch.load(), ++at.same[{slice, from}]);
    }
}

// Its gradient is read until all of it has left, though a peer may have answered before.
inline bool Plane::completes(int parameter) {
    const bool all = !leaving_[parameter] && worker_.is_complete(parameter);
    if (all) {
        complete_[parameter] = true;
        note_ready(parameter);
    }
    return all;
}

inline void Plane::reply_came(int from, const Frame& reply, std::size_t bytes,
                              std::int64_t began_ns) {
    spans_.note({Stage::reply_received, reply.slice, reply.step, reply.priority, from, bytes,
                 began_ns, spans_.now()});
    worker_heard([&] {
        if (!(reply.flags & unchanged)) answered_[setting_.slices[reply.slice].parameter] = true;
        ++replies_;
        reply_bytes_ += static_cast<std::int64_t>(bytes);
        if (bytes) raw_reply_bytes_ += raw_bytes_of(reply);
        return worker_.reply_arrived(reply.slice, reply.step, from, reply.flags);
    });
}
// What the worker's machine makes of something that has come.
template <class Event>
void Plane::worker_heard(Event event) {
    bool any = false;
    {
        std::lock_guard lock(worker_mutex_);
        const Instructions told = event();
        for (const Instruction& each : told) {
            if (each.what == Instruction::complete) any |= completes(each.frame.slice);
        }
        post(worker, setting_.rank, told);
    }
    if (any) ring();
}

}  // namespace foreprop
