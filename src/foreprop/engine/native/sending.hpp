// The plane's sending thread: what the machines let leave, small frames together.
#pragma once

#include "plane.hpp"

namespace foreprop {

inline void Plane::send_all() {
    std::vector<epoll_event> events(64);
    while (!stopping_) {
        take_copied();
        take_posted();
        sender_sleeps_ = true;
        bool more;
        {
            std::lock_guard lock(posted_mutex_);
            more = !posted_.empty() || !messages_.empty() || !released_.empty();
        }
        std::int64_t until_ns = first(clearing_, &Connection::cleared_ns);
        if (copies_) {
            const std::int64_t look = now_ns() + look_ns;
            until_ns = until_ns ? std::min(until_ns, look) : look;
        }
        const int count = wait_for(sending_, events, more, until_ns);
        sender_sleeps_ = false;
        for (const Shared& each : due(clearing_, &Connection::cleared_ns)) {
            each->waits = false;
            flush(*each);
        }
        for (int n = 0; n < count; ++n) {
            const Id id = events[n].data.u64;
            if (!id) {
                slept(wake_sender_);
            } else if (const Shared connection = find(id)) {
                if (events[n].events & (EPOLLERR | EPOLLHUP)) {
                    epoll_ctl(sending_, EPOLL_CTL_DEL, connection->fd, nullptr);
                    cannot_send(*connection, EPIPE);
                    abandon(*connection);
                    continue;
                }
                set_waiting(*connection, false);  // else it is told of room as long as there is
                if (std::exchange(connection->owes_word, false)) tell_sent(*connection);
                flush(*connection);
            }
        }
    }
}

inline void Plane::push(int parameter, Step step, Flags flags, const void* from, void* to,
                        std::int64_t* word, std::int64_t number) {
    std::lock_guard lock(worker_mutex_);
    if (const Copying* copying = copying_of(parameter))
        throw WorkerMachine::pending(parameter, step, copying->step);
    if (worker_.is_complete(parameter)) {  // else it is refused
        gradients_[parameter] = static_cast<const std::uint8_t*>(from);
        results_[parameter] = static_cast<std::uint8_t*>(to);
        answered_[parameter] = complete_[parameter] = false;
        leaving_[parameter] = 0;
        if (word) {
            const bool first = copying_.empty();  // else the sending thread looks anyway
            copying_.push_back({parameter, step, flags, word, number});
            copies_ = true;
            if (first && sender_sleeps_.exchange(false)) wake(wake_sender_);
            return;
        }
    }
    gradient_is_here(parameter, step, flags);
}

inline void Plane::gradient_is_here(int parameter, Step step, Flags flags) {
    const Instructions told = worker_.gradient_ready(parameter, step, flags, false);
    queued_ns_[parameter][step & 1] = now_ns();
    complete_[parameter] = worker_.is_complete(parameter);
    if (complete_[parameter]) note_ready(parameter);
    post(worker, setting_.rank, told);
}

// What a device has copied since the last look leaves as any gradient, in the order of the copies.
inline void Plane::take_copied() {
    if (!copies_) return;
    bool any = false;
    {
        std::lock_guard lock(worker_mutex_);
        std::erase_if(copying_, [&](const Copying& each) {
            if (!each.is_over()) return false;
            gradient_is_here(each.parameter, each.step, each.flags);
            if (each.pulls) post(worker, setting_.rank, worker_.pulls_due());
            any |= complete_[each.parameter];  // one without slices
            return true;
        });
        copies_ = !copying_.empty();
    }
    if (any) ring();
}

inline const Copying* Plane::copying_of(int parameter) const {
    for (const Copying& each : copying_)
        if (each.parameter == parameter) return &each;
    return nullptr;
}

inline Step Plane::step_of(int parameter) {
    std::lock_guard lock(worker_mutex_);
    const Copying* copying = copying_of(parameter);
    return copying ? copying->step : worker_.step_of(parameter);
}

inline std::vector<std::pair<int, int>> Plane::missing(int parameter) {
    std::lock_guard lock(worker_mutex_);
    std::vector<std::pair<int, int>> all;
    for (const auto& each : worker_.missing_slices(parameter)) all.emplace_back(each);
    if (!copying_of(parameter)) return all;
    for (int number = 0; number < static_cast<int>(setting_.slices.size()); ++number)
        if (setting_.slices[number].parameter == parameter) all.emplace_back(number, 2);
    return all;
}

inline void Plane::take_posted() {
    std::vector<Posted> taken;
    std::vector<Message> messages;
    std::vector<Shared> released;
    {
        std::lock_guard lock(posted_mutex_);
        taken.swap(posted_);
        messages.swap(messages_);
        released.swap(released_);
    }
    for (const Shared& each : released) abandon(*each);
    std::vector<Shared> touched;
    const auto touch = [&](const Shared& each) {
        if (std::find(touched.begin(), touched.end(), each) == touched.end())
            touched.push_back(each);
    };
    for (auto& [connection, data, ticket] : messages) {
        Outgoing& out = connection->out.emplace_back();
        add_whole(out, data);
        out.told = true;
        out.ticket = ticket;
        touch(connection);
    }
    for (auto& [role, own, frame] : taken) {
        const Shared connection = find(role, own, frame.peer);
        if (!connection || connection->send_error) {  // it is lost: who reads it says so
            give_up(role, own, frame);
            continue;
        }
        enqueue(*connection, frame);
        touch(connection);
    }
    for (const Shared& each : touched)
        if (!each->waits) flush(*each);
}

// A whole frame that was to leave in its turn.
inline Buffer Plane::message_of(const Frame& frame) {
    std::lock_guard lock(posted_mutex_);
    const auto found = whole_.find(frame.token);
    Buffer whole = std::move(found->second);
    whole_.erase(found);
    return whole;
}

inline void Plane::add_whole(Outgoing& out, Buffer whole) {
    out.header_size = 0;
    out.payload = whole->data();
    out.size = whole->size();
    out.held = std::move(whole);
}

inline void Plane::enqueue(Connection& connection, const Frame& frame) {
    Outgoing& out = connection.out.emplace_back();
    out.frame = frame;
    if (frame.token != no_token) {
        add_whole(out, message_of(frame));
        return;
    }
    const Piece& piece = setting_.slices[frame.slice];
    if (connection.role == worker) {
        out.queued_ns = queued_ns_[piece.parameter][frame.step & 1];
        if (is(frame, Kind::push)) {
            out.held = leaving_gradient(piece, frame);
            if (!(frame.flags & no_gradient)) {
                out.payload = out.held ? out.held->data() : gradient_of(piece);
                out.size = out.held ? out.held->size() : piece.size_bytes;
            }
        }
    } else {
        std::unique_lock lock(servers_.at(connection.index)->mutex);
        out.queued_ns = made_ns_[frame.slice];
        if (is(frame, Kind::reply) && !(frame.flags & unchanged)) {
            Sum& sum = sums_[frame.slice];
            if (!std::erase(sum.owed, frame.peer)) {  // it has pulled it twice, or too early
                const bool is_gone = !servers_.at(connection.index)->machine.is_here(frame.peer);
                lock.unlock();
                connection.out.pop_back();
                if (is_gone) {
                    give_up(server, connection.index, frame);
                    return;
                }
                refuse(connection, {ProtocolError::remote,
                                    name_of(frame.peer) + " pulled slice " + text_of(frame.slice) +
                                        ", whose average it is not owed"});
                return;
            }
            out.held = sum.owed.empty() ? std::move(sum.data) : sum.data;
            out.payload = out.held->data();
            out.size = out.held->size();
        }
    }
    out.started_ns = spans_on(connection.role, connection.index).now();
    seal(sender_on(connection), frame, out.payload, out.size, out.header);
}

inline const std::uint8_t* Plane::gradient_of(const Piece& piece) const {
    return gradients_[piece.parameter] + piece.start_bytes;
}

// In another type or as a code, while its bytes are in the cache; null if it leaves as it is.
inline Buffer Plane::leaving_gradient(const Piece& piece, const Frame& push) {
    if (piece.codec != Codec::none) {
        const bool builds = push.flags & builds_on;
        SliceResidual& left_out = left_out_[push.slice];
        left_out.follow(piece.codec, piece.elems(), round_of(push), scales_.at(push.step), builds);
        if (push.flags & no_gradient) return nullptr;
        return coded(left_out, piece, round_of(push), gradient_of(piece));
    }
    if (!piece.is_cast() || push.flags & no_gradient) return nullptr;
    Buffer cast = buffers_.take(piece.size_bytes);
    piece.narrow(gradient_of(piece), cast->data());
    return cast;
}

// Null for what is not finite: nobody may lose an infinity, for which a scaler looks.
inline Buffer Plane::coded(SliceResidual& left_out, const Piece& piece, Round round,
                           const void* from) {
    const auto* values = static_cast<const float*>(from);
    if (not_finite(values, piece.elems()).elems) return nullptr;
    Buffer code = buffers_.take(piece.usual_bytes());
    left_out.encode(piece.codec, round, values, piece.elems(), code->data());
    return code;
}

inline void Plane::decode_to(std::uint8_t* to, const Piece& piece, const Frame& frame,
                             const Buffer& code) {
    if (decode(piece.codec, code->data(), piece.elems(), reinterpret_cast<float*>(to))) return;
    const std::string which = "slice " + text_of(frame.slice) + ", step " + text_of(frame.step);
    throw ProtocolError(ProtocolError::remote, which + ": what has come is no code of its codec");
}

inline Buffer Plane::decoded(const Piece& piece, const Frame& frame, const Buffer& code) {
    Buffer values = buffers_.take(piece.size_bytes);
    decode_to(values->data(), piece, frame, code);
    return values;
}

inline int Plane::sender_on(const Connection& connection) const {
    return connection.role == worker ? setting_.rank : connection.index;
}

inline void Plane::seal(int sender, const Frame& frame, const std::uint8_t* payload,
                        std::size_t size, std::uint8_t* out) const {
    const Header header{frame.kind,
                        static_cast<std::uint16_t>(frame.flags),
                        static_cast<std::uint16_t>(sender),
                        frame.step,
                        static_cast<std::uint32_t>(frame.slice),
                        frame.priority,
                        static_cast<std::uint32_t>(size)};
    encode_header(header, payload, setting_.checked, out);
}

// The header before a payload that is there.
inline void Plane::seal_whole(int sender, const Frame& frame,
                              std::vector<std::uint8_t>& whole) const {
    seal(sender, frame, whole.data() + header_bytes, whole.size() - header_bytes, whole.data());
}

// Writes until there is nothing left or no room. Of small frames the next one is let go before
// the first has left, so that one system call takes several. Nothing overtakes those, as nothing
// overtakes what the kernel has: they are at most half of what it may hold. More of them made steps
// of 8 nodes 3 % longer (lab/docs/notebook/16-nodes.md).
inline void Plane::flush(Connection& connection) {
    auto& out = connection.out;
    const bool is_paced = connection.is_paced;
    const bool tells_late = connection.waits_for_room || is_paced;
    std::size_t held = setting_.unsent_bytes;
    if (connection.bound) held = std::min(held, static_cast<std::size_t>(connection.bound->bytes()));
    const std::size_t together = std::min(together_bytes, held / 2);
    while (!connection.owes_word) {
        std::size_t bytes = 0;
        for (std::size_t n = 0; n < out.size() && !tells_late; ++n) {
            bytes += out[n].header_size + out[n].size;
            if (out[n].told || bytes >= together || static_cast<int>(n) + 1 >= most_frames)
                continue;
            out[n].told = true;
            tell_sent(connection);
        }
        if (out.empty() || (is_paced && !may_leave(connection))) return;
        std::size_t most = is_paced ? connection.cleared : std::numeric_limits<std::size_t>::max();
        iovec parts[2 * most_frames];
        int count = 0;
        std::size_t skip = connection.sent;
        for (std::size_t n = 0; n < out.size() && count + 2 <= 2 * most_frames; ++n) {
            add(parts, count, out[n].header, out[n].header_size, skip, most);
            add(parts, count, out[n].payload, out[n].size, skip, most);
        }
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = static_cast<std::size_t>(count);
        const ssize_t sent = sendmsg(connection.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0) {
            if (errno == EINTR) continue;
            if (errno == EAGAIN) {
                set_waiting(connection, true);
                return;
            }
            cannot_send(connection, errno);  // its other end, or who reads it, knows why
            abandon(connection);
            set_waiting(connection, false);
            return;
        }
        if (is_paced) connection.cleared -= static_cast<std::size_t>(sent);
        connection.sent += static_cast<std::size_t>(sent);
        while (!out.empty() && connection.sent >= out.front().header_size + out.front().size) {
            connection.sent -= out.front().header_size + out.front().size;
            const Outgoing gone = std::move(out.front());
            out.pop_front();
            has_left(connection, gone);
            if (connection.owes_word) return;
        }
    }
}

// Nothing of it leaves any more.
inline void Plane::abandon(Connection& connection) {
    connection.sent = 0;
    for (const Outgoing& each : std::exchange(connection.out, {}))
        if (!each.ticket) give_up(connection.role, connection.index, each.frame, each.told);
    if (std::exchange(connection.owes_word, false)) {
        const Frame word{.peer = connection.peer, .token = no_token};
        give_up(connection.role, connection.index, word);
    }
}

// A frame will not leave, for its peer is gone. An elastic session goes on as if it had: where its
// slice has another server, the machine lets it leave once more. `told`: so it has been already.
inline void Plane::give_up(Role role, int own, const Frame& frame, bool told) {
    if (frame.token != no_token) {
        std::lock_guard lock(posted_mutex_);
        whole_.erase(frame.token);
    }
    if (!setting_.elastic) return;
    bool any = false;
    if (role == worker) {
        own = setting_.rank;
        std::lock_guard lock(worker_mutex_);
        if (is(frame, Kind::push) && frame.token == no_token) {
            const int parameter = setting_.slices[frame.slice].parameter;
            --leaving_[parameter];
            any = completes(parameter);
        }
        if (!told) post(role, own, worker_.frame_sent(frame.peer));
    } else if (!told) {
        Server& at = *servers_.at(own);
        std::lock_guard lock(at.mutex);
        post(role, own, at.machine.frame_sent(frame.peer));
    }
    if (any) ring();
    if (role == worker) ring_if_idle();
}

inline void Plane::has_left(Connection& connection, const Outgoing& gone) {
    if (gone.ticket) {
        {
            std::lock_guard lock(connection.mutex);
            *gone.ticket = true;
        }
        connection.changed.notify_all();
        return;
    }
    const bool is_slice = gone.frame.token == no_token;
    if (is_slice) note_sent(connection.role, connection.index, gone);
    if (is_slice && is(gone.frame, Kind::push)) {
        bool any;
        {
            std::lock_guard lock(worker_mutex_);
            ++pushes_;
            pushed_bytes_ += static_cast<std::int64_t>(gone.size);
            const Piece& piece = setting_.slices[gone.frame.slice];
            if (gone.size) raw_pushed_bytes_ += static_cast<std::int64_t>(piece.size_bytes);
            const int parameter = piece.parameter;
            --leaving_[parameter];
            any = completes(parameter);
        }
        if (any) ring();
    }
    if (connection.bound && gone.size) adapt(connection);
    if (gone.told) return;
    if (connection.waits_for_room && !has_room(connection.fd)) {
        connection.owes_word = true;
        set_waiting(connection, true);
    } else {
        tell_sent(connection);
    }
}

inline Spans& Plane::spans_on(Role role, int own) {
    return role == worker ? spans_ : servers_.at(own)->spans;
}

// What has left, in a trace.
inline void Plane::note_sent(Role role, int own, const Outgoing& gone) {
    Spans& spans = spans_on(role, own);
    const Frame& f = gone.frame;
    if (!spans.noted() || is(f, Kind::notify) || is(f, Kind::pull)) return;
    Span span{.stage = Stage::push_queued,
              .slice = f.slice,
              .step = f.step,
              .priority = f.priority,
              .peer = f.peer,
              .bytes = gone.size,
              .start_ns = gone.queued_ns,
              .stop_ns = gone.started_ns};
    if (role == server) span.stage = Stage::reply_queued;
    spans.note(span);
    span.stage = role == server ? Stage::reply_sent : Stage::push_sent;
    span.start_ns = gone.started_ns;
    span.stop_ns = now_ns();
    spans.note(span);
}

inline void Plane::note_ready(int parameter) {
    if (!spans_.noted()) return;
    const std::int64_t now = now_ns();
    spans_.note(
        {Stage::parameter_ready, parameter, worker_.step_of(parameter), 0, -1, 0, now, now});
}

inline bool Plane::has_room(int fd) {
    pollfd asked{.fd = fd, .events = POLLOUT, .revents = 0};
    return poll(&asked, 1, 0) != 0;
}

inline void Plane::adapt(Connection& connection) {
    tcp_info info{};
    socklen_t size = sizeof info;
    if (getsockopt(connection.fd, IPPROTO_TCP, TCP_INFO, &info, &size)) return;
    // `tcpi_min_rtt` is at 148, behind what older headers know
    std::uint8_t whole[152];
    socklen_t whole_size = sizeof whole;
    if (getsockopt(connection.fd, IPPROTO_TCP, TCP_INFO, whole, &whole_size) ||
        whole_size < sizeof whole)
        return;
    std::uint32_t shortest_us;
    std::memcpy(&shortest_us, whole + 148, sizeof shortest_us);
    if (!shortest_us || shortest_us == ~0u) return;
    if (connection.bound->observe(info.tcpi_rtt, shortest_us)) {
        const int bytes = connection.bound->bytes() / 2;
        setsockopt(connection.fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
    }
}

inline void Plane::add(iovec* parts, int& count, const std::uint8_t* data, std::size_t size,
                       std::size_t& skip, std::size_t& most) {
    const std::size_t over = std::min(skip, size), some = std::min(size - over, most);
    skip -= over;
    most -= some;
    if (some) parts[count++] = {const_cast<std::uint8_t*>(data) + over, some};
}

// Whether some of the first frame has passed the emulated link; else it is flushed when it has.
inline bool Plane::may_leave(Connection& connection) {
    if (connection.cleared) return !connection.cleared_ns;
    const Outgoing& next = connection.out.front();
    const std::size_t left = next.header_size + next.size - connection.sent;
    const std::size_t most = Link::chunk_bytes + (connection.sent ? 0 : next.header_size);
    connection.cleared = std::min(left, most);
    connection.cleared_ns = egress_->occupy(connection.cleared);
    clearing_.push_back(connection.shared_from_this());
    connection.waits = true;
    return false;
}

// The connections whose bytes have passed the emulated link by now.
inline std::vector<Shared> Plane::due(std::vector<Shared>& all, std::int64_t Connection::* when) {
    const auto now = all.empty() ? 0 : now_ns();
    const auto later = [&](const Shared& each) { return (*each).*when > now; };
    const auto split = std::partition(all.begin(), all.end(), later);
    std::vector<Shared> found(split, all.end());
    all.erase(split, all.end());
    for (const Shared& each : found) (*each).*when = 0;
    return found;
}

inline std::int64_t Plane::first(const std::vector<Shared>& all, std::int64_t Connection::* when) {
    std::int64_t least = 0;
    for (const Shared& each : all)
        if (!least || (*each).*when < least) least = (*each).*when;
    return least;
}

inline void Plane::set_waiting(Connection& connection, bool waits) {
    connection.waits = waits;
    if (connection.armed == waits) return;
    connection.armed = waits;
    watch(EPOLL_CTL_MOD, sending_, connection.fd, waits ? std::uint32_t{EPOLLOUT} : 0u,
          connection.id);
}

// What may follow is queued at once, for whichever peer it is.
inline void Plane::tell_sent(Connection& connection) {
    const int peer = connection.peer;
    Instructions told;
    const bool works = connection.role == worker;
    std::mutex& mutex = works ? worker_mutex_ : servers_.at(connection.index)->mutex;
    {
        std::lock_guard lock(mutex);
        told = works ? worker_.frame_sent(peer)
                     : servers_.at(connection.index)->machine.frame_sent(peer);
        Instructions others;
        for (const Instruction& each : told) {
            if (each.frame.peer != peer) {
                others.push_back(each);
            } else if (works) {
                note_leaving(each.frame);
            }
        }
        post(connection.role, works ? setting_.rank : connection.index, others);
    }
    for (const Instruction& each : told)
        if (each.what == Instruction::send && each.frame.peer == peer)
            enqueue(connection, each.frame);
    if (works && told.empty()) ring_if_idle();
}

inline void Plane::ring_if_idle() {
    bool is_idle;
    {
        std::lock_guard lock(worker_mutex_);
        is_idle = idle();
    }
    if (is_idle) ring();
}

}  // namespace foreprop
