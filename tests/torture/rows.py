"""The log of faults that users of cache managers reported: a number, a class, and in a few words what went wrong."""

CLASSES = {
    "LEAK": "Blocks lost, or given back twice",
    "IDENT": "One content taken for another",
    "BOUND": "Ends of blocks and prompts",
    "SPEC": "Drafts and steps back",
    "HYBRID": "Windows, states, and groups that must agree",
    "PRESS": "Too little memory",
    "RACE": "Copies under way",
    "STORE": "Disks and servers",
    "EVENT": "Events, and who follows them",
    "STATS": "Numbers that mislead",
    "INT32": "More than 32 bits can count",
    "RANK": "Ranks that part ways",
    "SIZE": "How much memory is taken",
    "PERF": "Work that grows with what is cached",
    "RESET": "Forgetting everything",
    "ASK": "What users ask for",
}
"""Classes of faults, by the letters that the log uses."""

LOG = {
    "LEAK": """
        B001 A list of blocks to be freed names one of them twice, and both count
        B002 Two ways to release, of which one counts before it filters
        B003 A request for fewer blocks than are held becomes a negative number
        B005 Several holders of one block, and one of them releases for another
        B006 A block leaves the free list with its links still set
        B007 The place holder of a window's gap is freed as if it were a block
        B009 The count of free blocks falls although the call then fails
        B010 A block that is free already is put into the free list again
        B011 A pinned block is in the free list at the same time
        B013 Blocks and nodes own each other and are never collected
        B014 Chains of blocks that are gone grow on, and end in a recursion too deep
        B015 A block changes tiers before it has left the list of the old one
        B017 More is freed than there is, where requests end inside a page
        B018 Two places of the code free the slot of the last step
        B019 A page that two computed at once is counted twice
        B021 A split does not move the counts that it splits
        B022 A request dies between its match and its blocks, and what it matched stays held
        B023 An admission that finds no room keeps what it had matched
        B025 One block is lost with each request
        B026 A count that falls only at some number of references never falls
        B027 A full pool in host memory evicts what is pinned and counts below zero
        B029 A second unpin is swallowed, at the cost of another owner
        B030 What writes a copy down keeps a reference of its own
        B031 What a look-up has locked stays locked where it is not loaded
        B033 Blocks wait for a peer that died
        B034 A hold runs its full time although it is known to be in vain
        B035 A transfer of nothing never reports its end
        B037 A late result reaches the next life of the same request
        B038 The result of a chunk comes after its request was aborted
        B039 A request that is not to be cached forgets its own progress
        B041 Releasing a request that never got blocks is fatal
        B042 The cache holds one copy while the request holds another
        B043 A fork does not count as a holder of what it shares
        B045 A block is handed out while it can still be found as its old content
    """,
    "IDENT": """
        B046 A hash that can be made to collide decides what is equal
        B047 Hashes differ from process to process
        B049 The same text as an adapter's name and as a salt is one identity
        B050 Equal hashes are believed without a look at the tokens
        B051 Token ids are cut to eight bits before they are compared
        B053 All images stand on the same placeholder tokens
        B054 Images of one prompt contaminate the next
        B055 A hit on another image's blocks ends the worker
        B057 Which positions are embeddings is not part of the identity
        B058 What the embeddings hold is not part of the identity
        B059 An adapter that was loaded anew keeps the blocks of the old one
        B061 The adapter that a request chooses is not part of the identity
        B062 The identity of an adapter is lost on the way to a slower tier
        B063 The salt is lost on the way to a slower tier
        B065 What is kept on disk does not say which model computed it
        B066 Weights change, and what the old ones computed is still found
        B067 A cache of encoder outputs outlives a change of the adapter
        B069 A request that needs every position gets only those not cached
        B070 Texts diverge under cancels, retries and alternating adapters
    """,
    "BOUND": """
        B071 A prompt that is cached whole leaves nothing to compute
        B073 A full hit is fatal
        B074 A block is found before anybody has computed it
        B075 A chunk is cached and its pages are freed by the abort
        B077 A load writes into blocks that others read
        B078 The last token of a prompt falls out of what is saved
        B079 At an exact multiple of a block the boundary is one short
        B081 Two sequences write into the same half-filled block
        B082 Beams part ways without a copy of their last block
        B083 A beam's half-written last block gets published
    """,
    "SPEC": """
        B085 Drafts that were only proposed count as computed
        B086 A state that has seen rejected drafts is kept as if it had not
        B087 Each hit loses a whole unit to the look-ahead, and nobody says so
        B089 The draft model's cache does not step back with the target's
        B090 The manager writes into the request, and a second manager believes it
        B091 A step back is one token too long, each time
        B093 The block table has no column for drafts at the greatest length
        B094 The bound of a row is checked against what is added, not the sum
    """,
    "HYBRID": """
        B095 What a window has let go of is published when the sequence ends
        B097 A block is larger than the window
        B098 A prompt that parts ways inside the last block finds nothing
        B099 Tokens, blocks and slots are mixed up in an alignment
        B101 The only state that is kept lies where no other prompt passes
        B102 A state is looked up by the block size of another group
        B103 A hit on K and V comes with a state of another request
        B105 A block size that the layout cannot have is taken without a word
        B106 The pool of a window has room for one sequence
        B107 Keeping a state evicts the blocks of the one who keeps it
        B109 The least that can be reused is large, and nobody says so
        B110 Two units do not divide one another, found at the first request
        B147 One part of a prefix is restored to another depth than the rest
    """,
    "PRESS": """
        B111 A prompt that can never fit waits for ever, and all others behind it
        B113 Blocks whose release has to wait count as free, so all are preempted
        B114 Two requests preempt each other for ever
        B115 A refusal writes a line into the log, millions of times
        B117 Near full, work comes to a halt
        B118 Preemption costs much, and nothing counts it
        B119 Bringing a block up needs a free block on the device
        B121 The same request is preempted again and again
        B122 Everybody is preempted for one that then does not fit
        B123 A wait for memory has no end
        B125 Holds that are over are only noticed by an eviction that never comes
        B126 An eviction waits for a store that hangs
        B127 A block in the middle of a chain is evicted
        B129 What a prompt would reuse is also counted as room for it
        B130 A flood of prompts of one tenant washes out all others
    """,
    "RACE": """
        B131 Two blocks go down to the same place, and the second ends first
        B133 A block is copied before it has been written
        B134 A load overwrites what the last step still reads
        B135 Clearing new blocks wipes out what was just loaded into them
        B137 A block is given to another while it is being copied away
        B138 What is being loaded is evicted below
        B139 Loading evicts, evicting writes back, and that evicts what is loaded
        B141 A restored page is still in use by a step under way
        B142 What a look-up found is gone when it is to be loaded
        B143 A block is evicted before the sender has read it, and nobody hears
        B145 A load that never ends holds its request for ever
        B146 A load that failed in part shortens some sequences and not all
    """,
    "STORE": """
        B149 After a restart the disk is full of what nobody can find
        B150 A file that is gone ends the engine
        B151 A file is read while it is written
        B153 A file that is cut short ends the thread that reads
        B154 Bytes are read back in another layout than they were written in
        B155 Of an entry's two keys the server keeps one
        B157 A long read has no deadline
        B158 Memory that was lent runs out of its lease during the transfer
        B159 What a store did not take is never offered again
        B161 All of a prefix but its beginning is there, and so never used
        B162 One batch that failed ends the writing of all others
        B163 Several processes count the same disk, each for itself
        B165 At the limit, what was just stored goes first
        B166 The beginning of a chain is evicted before its end
    """,
    "EVENT": """
        B167 Events do not name the block before
        B169 Events name a block before that nobody was told of
        B170 Tokens and hashes of an event are not of the same blocks
        B171 One of two copies goes, and the content is told to be gone
        B173 A snapshot does not say where in the stream it stands
        B174 A reader that comes late does not see that something is missing
        B175 The numbers of several ranks are taken for one row
        B177 A worker restarts, and its empty cache is still credited
        B178 Everything was cleared, and the reader keeps it
        B179 One tier was cleared, and all are told to be
        B181 Worker and reader count in blocks of different sizes
        B182 Blocks of a coarser tier are credited in parts
        B183 One unknown block ends a list of removals
        B185 An event that cannot be encoded ends the service
        B186 Events wait for a timer, and come from every rank
        B187 Events of a slower tier lack what a reader needs
    """,
    "STATS": """
        B189 Each failed try counts as a look-up
        B190 What a preempted request finds again counts as a hit
        B191 Usage falls below zero
        B193 What matched is reported, not what was saved
        B194 The warm-up is part of the hit rate
        B195 Counts of the device include host memory
        B197 Each step counts the hits of the prompt again
    """,
    "INT32": """
        B198 Offsets of elements wrap in 32 bits
        B199 A pool is larger than its indices can name
        B201 A product of page and stride wraps
        B202 The first block beyond 2**31 elements is wrong
        B203 An index grows with each request instead of being used again
    """,
    "RANK": """
        B205 Ranks have different numbers of blocks, and evict differently
        B206 One rank is given an id that it does not have
        B207 Ranks have different room in host memory
        B209 Ranks disagree at the start, and the first collective hangs
    """,
    "SIZE": """
        B210 The fraction of free memory to be used is ignored
        B211 Nobody can follow how the number of blocks came about
        B213 Another process changes free memory during the measurement
        B214 A number of bytes that was asked for is not what is taken
        B215 Pinning host memory takes minutes at the start
        B217 A setting is taken, and never reaches what it sets
        B218 A tier in host memory takes device memory
        B219 The budget bounds one pool and not the other
    """,
    "PERF": """
        B221 Each eviction sorts all candidates anew
        B222 Each chunk of a prompt touches all that is left of it
        B223 One object a block, and the garbage collector reads them all
        B225 Hashing a prompt costs more than computing part of it
        B226 A round trip for each block
        B227 Two locks are taken in two orders
    """,
    "RESET": """
        B229 A reset does nothing while something runs, and hardly says so
        B230 A reset leaves slower tiers as they were
        B231 A reset while copies are under way
    """,
    "ASK": """
        B233 Priorities with a time to live
        B234 Pins within a budget
        B235 Pins that belong to who made them
        B237 How long blocks live and idle
        B238 Sending content down by hand, and sizes by tier
        B239 Reuse together with beams
    """,
}
"""Rows of the log by class, one a line."""

REASONS: dict[str, str] = {}
"""Rows that cannot apply here and why, besides those that `tests.core.facts` gives reasons for."""

CLASS_OF = {line.split()[0]: name for name, lines in LOG.items() for line in lines.strip().splitlines()}
TITLES = {line.split()[0]: " ".join(line.split()[1:]) for lines in LOG.values() for line in lines.strip().splitlines()}
